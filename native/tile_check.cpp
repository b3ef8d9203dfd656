#include "tile_check.h"

#include <cpuid.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "half.h"
#include "product.h"

namespace kllm {

namespace {

constexpr int kRows = 100, kCols = 80, kStride = 96;  // seven panels, and columns that are no whole group

// Whole numbers from -8 to 8, the same ones every time.
class Numbers {
 public:
  int next() {
    state_ = state_ * 1664525 + 1013904223;
    return (int)(state_ >> 16) % 17 - 8;
  }

 private:
  uint32_t state_ = 1;
};

// One product and room for its results. Everything is allocated here, before the process forks.
class Trial {
 public:
  Trial(Format format, Type type, int rows) : matrix_(std::make_shared<Arena>(), format, kRows, kCols, false) {
    Numbers numbers;
    fill_matrix(numbers);
    x_ = {type, rows, kCols, kStride, data_.get(rows * kStride * size_of(type)), nullptr, nullptr};
    if (type == Type::kI8) {
      x_.scales = scales_.of<float>(rows * (kStride / kBlock));
      x_.sums = sums_.of<int32_t>(rows * (kStride / kBlock));
    }
    fill_activations(numbers);
    const size_t results = (size_t)rows * kRows;
    expected_.assign(results, -1);
    actual_.assign(results, -2);
    scratch_bytes_ = product_scratch_bytes();
    scratch_.get(scratch_bytes_);
  }

  void expect(const Kernels& plain) { multiply(plain, expected_.data()); }
  // Allocates nothing and takes no locks: it runs after a fork.
  bool agrees(const Kernels& tiles) {
    multiply(tiles, actual_.data());
    return memcmp(expected_.data(), actual_.data(), expected_.size() * sizeof(float)) == 0;
  }

 private:
  // Six panels as floats: the most that any product asks for.
  size_t product_scratch_bytes() const { return (size_t)6 * matrix_.padded_cols * kPanelRows * sizeof(float); }

  void fill_matrix(Numbers& numbers) {
    std::vector<int8_t> bytes(kRows * kCols);
    for (int8_t& byte : bytes) byte = (int8_t)numbers.next();
    const std::vector<float> floats(bytes.begin(), bytes.end()), ones(kRows, 1);
    if (matrix_.format == Format::kI8) matrix_.fill_int8(0, kRows, bytes.data(), ones.data());
    else matrix_.fill(0, kRows, floats.data());
  }

  void fill_activations(Numbers& numbers) {
    constexpr int groups = kStride / kBlock;
    if (x_.type == Type::kI8) {
      std::fill_n(x_.scales, x_.rows * groups, 1.0f);
      std::fill_n(x_.sums, x_.rows * groups, 0);
    }
    for (int i = 0; i < x_.rows * kStride; ++i) {
      const int number = i % kStride < kCols ? numbers.next() : 0;
      if (x_.type == Type::kI8) {
        ((int8_t*)x_.data)[i] = (int8_t)number;
        x_.sums[i / kBlock] += number;
      } else {
        ((uint16_t*)x_.data)[i] = to_bf16((float)number);
      }
    }
  }

  void multiply(const Kernels& kernels, float* y) {
    const Sink sink{Store::kSet, Type::kF32, y, kRows, nullptr};
    kernels.gemm({&matrix_, &x_, &sink, 0, x_.rows, 0, matrix_.panels, scratch_.get(scratch_bytes_), scratch_bytes_});
  }

  Matrix matrix_;
  Activations x_;
  Buffer data_, scales_, sums_, scratch_;
  size_t scratch_bytes_;
  std::vector<float> expected_, actual_;
};

// Runs f in a child process; whether it returns true there in time. The child of a process with threads may only do
// what a signal handler may, and must leave by _exit.
template <class F>
bool child_agrees(unsigned seconds, F&& f) {
  const pid_t child = fork();
  if (child < 0) return false;
  if (child == 0) {
    for (int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGALRM}) signal(number, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    alarm(seconds);
    _exit(f() ? 0 : 1);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return false;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

bool processor_has_tiles() {
  constexpr unsigned kTiles = 1u << 24, kBf16 = 1u << 22, kInt8 = 1u << 25, kAll = kTiles | kBf16 | kInt8;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kAll) != kAll) return false;
  // Linux lends the 8 KiB of tile registers only to processes that ask; threads and children have them too then.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool products_agree(const Kernels& tiles, const Kernels& plain, unsigned seconds) {
  std::vector<std::unique_ptr<Trial>> trials;
  for (int rows : {1, 37})
    for (auto [format, type] : {std::pair{Format::kBF16, Type::kBF16}, {Format::kI8, Type::kBF16}, {Format::kI8, Type::kI8}})
      trials.push_back(std::make_unique<Trial>(format, type, rows));
  for (auto& trial : trials) trial->expect(plain);
  return child_agrees(seconds, [&] {
    return std::all_of(trials.begin(), trials.end(), [&](auto& trial) { return trial->agrees(tiles); });
  });
}

}  // namespace kllm
