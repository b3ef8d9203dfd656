#define KLLM_ISA avx512_bf16
#include "isa.h"

namespace kllm {
extern const Kernels kAvx512Bf16Kernels = KLLM_TABLE("avx512_bf16");
}
