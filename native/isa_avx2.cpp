#define KLLM_ISA avx2
#include "isa.h"

namespace kllm {
extern const Kernels kAvx2Kernels = KLLM_TABLE("avx2");
}
