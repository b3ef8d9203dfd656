#include "pool.h"

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

namespace kllm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpinsPerLook = 64;        // pauses between two looks at the clock
constexpr int kSpinsBeforeYield = 4096;  // then the caller gives its core to whoever has the last task

void bind_to(std::thread& thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);  // a refusal costs speed, nothing else
}

}  // namespace

Pool::Pool(int threads, int spin_us, std::vector<int> cpus) : spin_us_(spin_us), parts_(std::max(threads, 1)) {
  for (int thread = 1; thread < threads; ++thread) {
    workers_.emplace_back([this, thread] { loop(thread); });
    if (thread < (int)cpus.size()) bind_to(workers_.back(), cpus[thread]);
  }
}

Pool::~Pool() {
  stop_.store(true);
  wakeups_.fetch_add(1);
  wakeups_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::dispatch(int tasks, Task task, void* context) {
  task_ = task;
  context_ = context;
  remaining_.store(tasks, std::memory_order_relaxed);
  const int count = (int)parts_.size();
  for (int part = 0; part < count; ++part)
    parts_[part].set(begin_of(part, count, tasks), begin_of(part + 1, count, tasks));
  region_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) {
    wakeups_.fetch_add(1, std::memory_order_seq_cst);
    wakeups_.notify_all();
  }
  work(0);
  for (int spins = 0; remaining_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpinsBeforeYield)
      _mm_pause();
    else
      sched_yield();
  }
}

// Takes tasks of the open region until none is left, of its own part first.
void Pool::work(int thread) {
  const int count = (int)parts_.size();
  for (int step = 0; step < count; ++step) {
    Part& part = parts_[(thread + step) % count];
    for (int task = part.take(); task >= 0; task = part.take()) {
      task_(context_, task, thread);
      remaining_.fetch_sub(1, std::memory_order_release);
    }
  }
}

void Pool::loop(int thread) {
  auto idle_since = Clock::now();
  uint32_t seen = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (const uint32_t region = region_.load(std::memory_order_acquire); region != seen) {
      seen = region;
      work(thread);
      idle_since = Clock::now();
      continue;
    }
    for (int i = 0; i < kSpinsPerLook && region_.load(std::memory_order_relaxed) == seen; ++i) _mm_pause();
    if (Clock::now() - idle_since < std::chrono::microseconds(spin_us_)) continue;
    uint32_t before = wakeups_.load(std::memory_order_seq_cst);
    parked_.fetch_add(1, std::memory_order_seq_cst);
    if (region_.load(std::memory_order_seq_cst) == seen && !stop_.load()) wakeups_.wait(before);
    parked_.fetch_sub(1, std::memory_order_seq_cst);
    idle_since = Clock::now();
  }
}

}  // namespace kllm
