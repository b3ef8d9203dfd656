// One set of threads for all of the extension's work. The thread that calls run() takes part.
//
// Tasks are claimed one by one, so a thread that the machine has taken away holds up at most the task it is in:
// with a fixed split, one busy neighbour on two cores halves the speed of both threads and more.
// Idle threads look for work for a while, since the next region of a step follows within microseconds, then park.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace kllm {

class Pool {
 public:
  using Task = void (*)(void* context, int task, int thread);

  // spin_us: how long an idle thread looks for work before it parks. cpus: one a thread to bind to, or empty.
  explicit Pool(int threads, int spin_us = 100, std::vector<int> cpus = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return (int)workers_.size() + 1; }

  // Calls f(task, thread) for every task in [0, tasks), at most 2^20 - 1, and returns when all are done.
  template <class F>
  void run(int tasks, F&& f) {
    if (tasks <= 1 || workers_.empty()) {
      for (int task = 0; task < tasks; ++task) f(task, 0);
      return;
    }
    dispatch(tasks, [](void* context, int task, int thread) { (*(std::remove_reference_t<F>*)context)(task, thread); },
             (void*)&f);
  }

 private:
  // One word says which region is open, how many tasks it has and which is next: generation 24 | tasks 20 | next 20.
  // A late thread can therefore never take a task of a region with the bounds of another.
  static constexpr int kBits = 20;
  static constexpr uint64_t kMask = (1u << kBits) - 1;

  void dispatch(int tasks, Task task, void* context);
  bool work(int thread);
  void loop(int thread);

  std::vector<std::thread> workers_;
  const int spin_us_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  uint64_t generation_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> remaining_{0};
  alignas(64) std::atomic<uint32_t> wakeups_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace kllm
