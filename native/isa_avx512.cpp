#define KLLM_ISA avx512
#include "isa.h"

namespace kllm {
extern const Kernels kAvx512Kernels = KLLM_TABLE("avx512");
}
