// Which instruction sets this processor has, which one is in use, and the threads.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace kllm {

// Names of the tables that can run here, best first; empty on a processor without AVX2.
std::vector<std::string> instruction_sets();
// Throws std::invalid_argument for a name that instruction_sets() does not list.
void use_instruction_set(const std::string& name);
const Kernels& kernels();

// Replaces the threads; no work may be running. cpus: one a thread to bind to, or empty.
void use_threads(int threads, int spin_us, const std::vector<int>& cpus);
Pool& pool();

// Tensors of a step (logits of a batch are megabytes) then reuse memory instead of taking fresh pages every time, which
// the system has to clear. For the whole process.
void keep_freed_memory();

}  // namespace kllm
