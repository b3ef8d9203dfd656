// One set of threads for all of the extension's work. The thread that calls run() takes part.
//
// Every thread has a part of a region's tasks, in order, so that rows stay in the cache of one core from region to region.
// Tasks are claimed one by one, and whoever is through with its part takes from those of others: so a thread that the
// machine has taken away holds up at most the task it is in. With a fixed split, one busy neighbour on two cores halves
// the speed of both threads and more.
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

  // Where the part of a thread begins; that of the last ends at begin_of(threads).
  static int begin_of(int thread, int threads, int tasks) { return (int)((int64_t)tasks * thread / threads); }

  // Calls f(task, thread) for every task in [0, tasks), and returns when all are done.
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
  // A thread's part of the region's tasks. One word says where it ends and which is next: a late thread can therefore
  // never take a task of a region with the bounds of another. Looked at before it is counted up, it is counted beyond the
  // end by no more than there are threads.
  struct alignas(64) Part {
    std::atomic<uint64_t> word{0};

    // The next task, or -1.
    int take() {
      if (!is_open(word.load(std::memory_order_acquire))) return -1;
      const uint64_t mine = word.fetch_add(1, std::memory_order_acq_rel);
      return is_open(mine) ? (int)(mine & kMask) : -1;
    }
    void set(int begin, int end) { word.store((uint64_t)end << kBits | (uint64_t)begin, std::memory_order_release); }

   private:
    static constexpr int kBits = 32;
    static constexpr uint64_t kMask = (1ull << kBits) - 1;
    static bool is_open(uint64_t word) { return (word & kMask) < word >> kBits; }
  };

  void dispatch(int tasks, Task task, void* context);
  void work(int thread);
  void loop(int thread);

  std::vector<std::thread> workers_;
  const int spin_us_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::vector<Part> parts_;                      // one a thread
  alignas(64) std::atomic<uint32_t> region_{0};  // counted up when all parts are set
  alignas(64) std::atomic<int> remaining_{0};
  alignas(64) std::atomic<uint32_t> wakeups_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace kllm
