// Attention, rotation and cache writes of one instruction set under plain names, for the tests and for timing.
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "attention.h"
#include "rotate.h"

using namespace kllm;

extern "C" {

size_t attention_scratch(int group, int head_dim, int type) { return KLLM_ISA::attention_scratch(group, head_dim, (Type)type); }
size_t floats_of_part(int head_dim) { return part_floats(head_dim); }
bool rounds_to_bytes() { return KLLM_ISA::CacheTraits<Type::kI8>::KeyDot::kDepth == 4; }
bool by_tiles() { return KLLM_ISA::tiled_type(Type::kBF16); }
int keys_of_part() { return kPartKeys; }
int bytes_of_attention_task() { return (int)sizeof(AttentionTask); }
int bytes_of_rotate_task() { return (int)sizeof(RotateTask); }
// As native/tile_check.cpp: Linux lends the registers of AMX to processes that ask.
bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
void attention(const AttentionTask* task) { KLLM_ISA::attention(*task); }
void merge_parts(const AttentionTask* task) { KLLM_ISA::merge_parts(*task); }
void rotate(const RotateTask* task) { KLLM_ISA::rotate(*task); }

// Processor seconds for all tasks, one after the other: the clock of this thread, so that neighbours count less.
double time_attention(const AttentionTask* tasks, int count) {
  auto now = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
  };
  const double begin = now();
  for (int i = 0; i < count; ++i) KLLM_ISA::attention(tasks[i]);
  return now() - begin;
}

}
