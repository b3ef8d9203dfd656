// What this machine can do at most: how fast it reads memory and how fast it multiplies. A kernel's time is compared
// with these, so they are measured the way a kernel would use the machine (all threads, contiguous parts).
//
// Nothing here depends on the other files of this folder. x86-64 only.
#pragma once

#include <cstddef>

namespace kllm {

// GB/s (1e9 bytes) at which `threads` threads read a buffer of `bytes`, each its own contiguous part, again and again
// for about `seconds`. A buffer that fits a cache is read from that cache. The memory is asked for in huge pages.
// Throws std::invalid_argument for sizes that make no sense, std::bad_alloc when there is no memory.
double read_bandwidth(std::size_t bytes, int threads, double seconds);

// Sum over `threads` threads of GFLOP/s (GOP/s for int8) of dot products whose operands stay in registers: a
// multiplication and an addition count as two. kind: "fp32", "bf16" (accumulated in fp32) or "int8" (accumulated in
// int32). Seconds are those of CPU time, so that busy neighbours do not count. The fastest instructions of this CPU are
// used; 0 when it has none for the kind.
// Throws std::invalid_argument for an unknown kind or senseless numbers.
double dot_rate(const char* kind, int threads, double seconds);

// The instructions that dot_rate uses for this kind, such as "AMX" or "AVX-512 VNNI"; empty when there are none.
const char* dot_instructions(const char* kind);

}  // namespace kllm
