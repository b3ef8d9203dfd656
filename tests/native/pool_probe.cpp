// The threads of the extension behind plain C names, for ctypes.
#include "../../native/pool.cpp"

#include <memory>

using namespace kllm;

namespace {

bool wait_for(const std::atomic<int>& count, int most) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (count.load() < most) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace

extern "C" {

// Runs as many regions as there are `sizes`, one after the other; counts[i] is how often the i-th task of all was called.
void run_regions(int threads, int spin_us, int regions, const int* sizes, int* counts) {
  Pool pool(threads, spin_us);
  for (int region = 0; region < regions; counts += sizes[region++])
    pool.run(sizes[region], [&](int task, int) { std::atomic_ref<int>(counts[task]).fetch_add(1); });
}

// One region whose task `held` ends only when all others have ended. Whether they did while it was held.
bool others_take_over(int threads, int tasks, int held) {
  Pool pool(threads);
  std::atomic<int> done{0};
  bool ended = false;
  pool.run(tasks, [&](int task, int) {
    if (task == held) ended = wait_for(done, tasks - 1);
    else done.fetch_add(1);
  });
  return ended;
}

// owners[task]: the thread that a region's task was done by, where every thread has its first task at the same time.
bool owners_of(int threads, int tasks, int* owners) {
  Pool pool(threads);
  std::atomic<int> begun{0};
  std::atomic<bool> together{true};
  auto first = std::make_unique<std::atomic<bool>[]>(threads);
  pool.run(tasks, [&](int task, int thread) {
    owners[task] = thread;
    if (first[thread].exchange(true)) return;
    begun.fetch_add(1);
    if (!wait_for(begun, threads)) together = false;
  });
  return together;
}

}  // extern "C"
