// Whether AMX can be trusted on this machine. It is tried out before it is used: a system or a virtual machine may
// report tiles that it does not keep, and the instructions then end the process that runs them.
#pragma once

#include "kernels.h"

namespace kllm {

// The processor has AMX with bfloat16 and int8, and the system lets this process use its registers.
bool processor_has_tiles();

// Whether products by `tiles` have the bits of those by `plain`, of numbers whose sums are exact in any order. `tiles`
// runs in a child process: a no is also what dies there or takes more than so many seconds.
bool products_agree(const Kernels& tiles, const Kernels& plain, unsigned seconds = 10);

}  // namespace kllm
