// The table of one instruction set. Included by isa_*.cpp after they have named it.
#include "attention.h"
#include "gemm.h"
#include "gemm_quantized.h"
#include "prepare.h"
#include "rotate.h"

namespace kllm {
namespace KLLM_ISA {

inline void gemm(const GemmTask& task) {
  switch (task.x->type) {
    case Type::kF32: return gemm_float<false>(task);
    case Type::kBF16: return gemm_float<true>(task);
    case Type::kI8: return gemm_int8(task);
    case Type::kI16: return;  // of AMX only
  }
}

}  // namespace KLLM_ISA

#define KLLM_TABLE(name) {name, KLLM_ISA::prepare, KLLM_ISA::gemm, KLLM_ISA::rotate, KLLM_ISA::attention, KLLM_ISA::merge_parts, KLLM_ISA::attention_scratch}

}  // namespace kllm
