#include "machine.h"

#include <malloc.h>

#include <memory>
#include <stdexcept>

#include "tile_check.h"

namespace kllm {

namespace {

const Kernels* current = nullptr;
std::unique_ptr<Pool> threads_in_use;

#if defined(KLLM_HAS_AMX)
// Tried out once per process.
bool amx_works() {
  static const bool works = processor_has_tiles() && products_agree(kAmxKernels, kAvx512Bf16Kernels);
  return works;
}
#endif

std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> tables;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(KLLM_HAS_AMX)
  if (avx512_bf16 && amx_works()) tables.push_back(&kAmxKernels);
#endif
  if (avx512_bf16) tables.push_back(&kAvx512Bf16Kernels);
  if (avx512) tables.push_back(&kAvx512Kernels);
  if (avx2) tables.push_back(&kAvx2Kernels);
  return tables;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* table : supported()) names.push_back(table->name);
  return names;
}

void use_instruction_set(const std::string& name) {
  for (const Kernels* table : supported())
    if (name == table->name) {
      current = table;
      return;
    }
  throw std::invalid_argument("instruction set " + name + " is unknown or not supported by this processor");
}

const Kernels& kernels() {
  if (!current) {
    auto tables = supported();
    if (tables.empty()) throw std::runtime_error("this processor has no AVX2");
    current = tables.front();
  }
  return *current;
}

void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
}

void use_threads(int threads, int spin_us, const std::vector<int>& cpus) {
  threads_in_use = std::make_unique<Pool>(threads, spin_us, cpus);
}

Pool& pool() {
  if (!threads_in_use) use_threads(1, 0, {});
  return *threads_in_use;
}

}  // namespace kllm
