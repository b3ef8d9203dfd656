#include "ceilings.h"

#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace kllm {
namespace {

constexpr int kMaxThreads = 1024;
constexpr double kMaxSeconds = 60.0;

void check(int threads, double seconds) {
  if (threads < 1 || threads > kMaxThreads) throw std::invalid_argument("threads must be from 1 to 1024");
  if (!(seconds > 0.0 && seconds <= kMaxSeconds)) throw std::invalid_argument("seconds must be above 0, at most 60");
}

double now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// What one thread did, in the unit of its work, from when to when, and how much CPU time it got for it. Seconds.
struct Share {
  double done = 0.0, start = 0.0, end = 0.0, cpu = 0.0;
};

// Runs work(thread) over and over in every thread for `seconds`, all at once. prepare(thread) runs first, untimed,
// followed by one untimed round of work. work returns how much it has done.
template <class Prepare, class Work>
std::vector<Share> run_all(int threads, double seconds, Prepare prepare, Work work) {
  std::atomic<int> waiting{threads};
  std::vector<Share> shares(threads);
  auto run = [&](int thread) {
    prepare(thread);
    work(thread);
    waiting.fetch_sub(1);
    while (waiting.load() > 0) std::this_thread::yield();
    Share share;
    const double cpu = now(CLOCK_THREAD_CPUTIME_ID);
    share.start = now(CLOCK_MONOTONIC);
    do {
      share.done += work(thread);
      share.end = now(CLOCK_MONOTONIC);
    } while (share.end - share.start < seconds);
    share.cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
    shares[thread] = share;
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
  return shares;
}

// ---- Reading ----

constexpr std::size_t kStep = 512;  // bytes: a multiple of what one round of any loop below reads

// Loads and nothing else, eight a round. Assembly, since a compiler would drop loads whose values are not used.
#define KLLM_LOAD(load, r, width, n) load " " width "*" n "(%0), %%" r n "\n\t"
#define KLLM_READER(name, load, r, width, finish)                                                     \
  void name(const char* data, std::size_t bytes) {                                                    \
    const char* const end = data + bytes;                                                             \
    asm volatile(                                                                                     \
        "1:\n\t" KLLM_LOAD(load, r, width, "0") KLLM_LOAD(load, r, width, "1")                        \
        KLLM_LOAD(load, r, width, "2") KLLM_LOAD(load, r, width, "3") KLLM_LOAD(load, r, width, "4")  \
        KLLM_LOAD(load, r, width, "5") KLLM_LOAD(load, r, width, "6") KLLM_LOAD(load, r, width, "7")  \
        "add $8*" width ", %0\n\t"                                                                    \
        "cmp %1, %0\n\t"                                                                              \
        "jne 1b\n\t" finish                                                                           \
        : "+r"(data)                                                                                  \
        : "r"(end)                                                                                    \
        : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");            \
  }

KLLM_READER(read_avx512, "vmovdqa64", "zmm", "64", "vzeroupper")
KLLM_READER(read_avx2, "vmovdqa", "ymm", "32", "vzeroupper")
KLLM_READER(read_sse2, "movdqa", "xmm", "16", "")

auto best_reader() {
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  return __builtin_cpu_supports("avx2") ? read_avx2 : read_sse2;
}

// Pages of its own, huge where the kernel agrees: with 4 KiB pages part of what is measured is address translation.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes + kHuge) {
    mapped_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    madvise(mapped_, bytes_, MADV_HUGEPAGE);  // a refusal only costs speed
  }
  ~Buffer() { munmap(mapped_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const {
    const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
    return static_cast<char*>(mapped_) + (kHuge - address % kHuge) % kHuge;
  }

 private:
  static constexpr std::size_t kHuge = std::size_t{2} << 20;
  void* mapped_;
  std::size_t bytes_;
};

// ---- Multiplying ----

constexpr int kRounds = 4000;  // per call: long enough to hide the call and the clock
constexpr int kChains = 12;    // independent sums: enough to hide the latency of the instruction on any x86 so far

// One round of a kernel: `instruction` on registers 14 and 15, added to each of the registers 0 to 11. It is assembly
// so that no compiler folds sums that are never used, and none needs to be told about the newest instructions.
#define KLLM_CHAIN(instruction, r, n) instruction " %%" r "14, %%" r "15, %%" r n "\n\t"
#define KLLM_CHAINS(instruction, r)  \
  KLLM_CHAIN(instruction, r, "0")    \
  KLLM_CHAIN(instruction, r, "1")    \
  KLLM_CHAIN(instruction, r, "2")    \
  KLLM_CHAIN(instruction, r, "3")    \
  KLLM_CHAIN(instruction, r, "4")    \
  KLLM_CHAIN(instruction, r, "5")    \
  KLLM_CHAIN(instruction, r, "6")    \
  KLLM_CHAIN(instruction, r, "7")    \
  KLLM_CHAIN(instruction, r, "8")    \
  KLLM_CHAIN(instruction, r, "9")    \
  KLLM_CHAIN(instruction, r, "10")   \
  KLLM_CHAIN(instruction, r, "11")

// Before AVX-512 VNNI an int8 dot product takes three instructions: bytes to words, words to int32, addition.
#define KLLM_MADD(r, n)                             \
  "vpmaddubsw %%" r "14, %%" r "15, %%" r "12\n\t"  \
  "vpmaddwd %%" r "12, %%" r "13, %%" r "12\n\t"    \
  "vpaddd %%" r "12, %%" r n ", %%" r n "\n\t"
#define KLLM_MADDS(r)  \
  KLLM_MADD(r, "0")    \
  KLLM_MADD(r, "1")    \
  KLLM_MADD(r, "2")    \
  KLLM_MADD(r, "3")    \
  KLLM_MADD(r, "4")    \
  KLLM_MADD(r, "5")    \
  KLLM_MADD(r, "6")    \
  KLLM_MADD(r, "7")    \
  KLLM_MADD(r, "8")    \
  KLLM_MADD(r, "9")    \
  KLLM_MADD(r, "10")   \
  KLLM_MADD(r, "11")

#define KLLM_ZERO(n) "vpxor %%xmm" n ", %%xmm" n ", %%xmm" n "\n\t"  // clears the whole register, whatever its width
#define KLLM_ZEROS                                                                           \
  KLLM_ZERO("0") KLLM_ZERO("1") KLLM_ZERO("2") KLLM_ZERO("3") KLLM_ZERO("4") KLLM_ZERO("5")  \
  KLLM_ZERO("6") KLLM_ZERO("7") KLLM_ZERO("8") KLLM_ZERO("9") KLLM_ZERO("10") KLLM_ZERO("11")

// Operands are real numbers, not zeros: a CPU may save power on zeros, and then runs faster than with data.
#define KLLM_KERNEL(name, r, body)                                                             \
  void name(std::uint32_t pattern) {                                                           \
    int rounds = kRounds;                                                                      \
    asm volatile(                                                                              \
      "vbroadcastss %1, %%" r "13\n\t"                                                         \
      "vbroadcastss %1, %%" r "14\n\t"                                                         \
      "vbroadcastss %1, %%" r "15\n\t" KLLM_ZEROS ".p2align 5\n"                               \
      "1:\n\t" body "decl %0\n\t"                                                              \
      "jnz 1b\n\t"                                                                             \
      "vzeroupper"                                                                             \
      : "+r"(rounds)                                                                           \
      : "m"(pattern)                                                                           \
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",  \
        "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                 \
  }

KLLM_KERNEL(fma_avx2, "ymm", KLLM_CHAINS("vfmadd231ps", "ymm"))
KLLM_KERNEL(fma_avx512, "zmm", KLLM_CHAINS("vfmadd231ps", "zmm"))
KLLM_KERNEL(bf16_avx512, "zmm", KLLM_CHAINS("vdpbf16ps", "zmm"))
KLLM_KERNEL(madd_avx2, "ymm", KLLM_MADDS("ymm"))
KLLM_KERNEL(madd_avx512, "zmm", KLLM_MADDS("zmm"))
KLLM_KERNEL(vnni_avx2, "ymm", KLLM_CHAINS("%{vex%} vpdpbusd", "ymm"))
KLLM_KERNEL(vnni_avx512, "zmm", KLLM_CHAINS("vpdpbusd", "zmm"))

// All eight tiles 16 rows of 64 bytes: four sums (0 to 3), two left (4, 5) and two right operands (6, 7).
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "as ldtilecfg reads it");

#define KLLM_TILES(instruction)              \
  instruction " %%tmm6, %%tmm4, %%tmm0\n\t"  \
  instruction " %%tmm7, %%tmm4, %%tmm1\n\t"  \
  instruction " %%tmm6, %%tmm5, %%tmm2\n\t"  \
  instruction " %%tmm7, %%tmm5, %%tmm3\n\t"

// The configuration is a 64-byte memory operand: gcc 12's _tile_loadconfig declares 8 bytes, so that the compiler drops
// the stores to the others, and the first tile instruction then dies with SIGILL.
#define KLLM_TILE_KERNEL(name, instruction)                      \
  void name(std::uint32_t pattern) {                             \
    const TileConfig config;                                     \
    alignas(64) std::uint32_t tile[16 * 16];                     \
    for (std::uint32_t& element : tile) element = pattern;       \
    int rounds = kRounds;                                        \
    asm volatile(                                                \
      "ldtilecfg %1\n\t"                                         \
      "tileloadd (%2, %3), %%tmm4\n\t"                           \
      "tileloadd (%2, %3), %%tmm5\n\t"                           \
      "tileloadd (%2, %3), %%tmm6\n\t"                           \
      "tileloadd (%2, %3), %%tmm7\n\t"                           \
      ".p2align 5\n"                                             \
      "1:\n\t" KLLM_TILES(instruction) "decl %0\n\t"             \
      "jnz 1b\n\t"                                               \
      "tilerelease"                                              \
      : "+r"(rounds)                                             \
      : "m"(config), "r"(tile), "r"(std::size_t{64}), "m"(tile)  \
      : "cc");                                                   \
  }

KLLM_TILE_KERNEL(bf16_amx, "tdpbf16ps")
KLLM_TILE_KERNEL(int8_amx, "tdpbssd")

struct Features {
  bool fma, avx512, avx512_bw, avx512_bf16, avx512_vnni, avx_vnni, amx_bf16, amx_int8;
};

// Linux lends the 8 KiB of tile registers only to processes that ask. False when the kernel or the CPU has none.
bool request_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Features detect() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx7 = 0, eax7_1 = 0, edx = 0;
  __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx7);
  if (eax >= 1) __get_cpuid_count(7, 1, &eax7_1, &ebx, &ecx, &edx);
  const bool avx2 = __builtin_cpu_supports("avx2");
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25, kAvxVnni = 1u << 4;
  const bool tiles = (edx7 & kAmxTile) != 0 && request_tiles();
  return {avx2 && __builtin_cpu_supports("fma"),
          __builtin_cpu_supports("avx512f") != 0,
          __builtin_cpu_supports("avx512bw") != 0,
          __builtin_cpu_supports("avx512bf16") != 0,
          __builtin_cpu_supports("avx512vnni") != 0,
          avx2 && (eax7_1 & kAvxVnni) != 0,
          tiles && (edx7 & kAmxBf16) != 0,
          tiles && (edx7 & kAmxInt8) != 0};
}

const Features& features() {
  static const Features found = detect();
  return found;
}

// A way to multiply. run: kRounds rounds of `chains` products, each of so many operations, additions included.
struct Multiplier {
  const char* name;
  void (*run)(std::uint32_t pattern);
  double operations;
  int chains;
  std::uint32_t pattern;
};

constexpr std::uint32_t kFloat = 0x3f000000;  // 0.5f
constexpr std::uint32_t kBf16s = 0x3f003f00;  // two times 0.5
constexpr std::uint32_t kBytes = 0x01010101;  // four times 1
constexpr int kTiles = 4;

Multiplier best_multiplier(std::string_view kind) {
  const Features& cpu = features();
  const Multiplier none{"", nullptr, 0.0, 0, 0};
  const Multiplier fma2{"AVX2 FMA", fma_avx2, 2.0 * 8, kChains, kFloat};
  const Multiplier fma5{"AVX-512 FMA", fma_avx512, 2.0 * 16, kChains, kFloat};
  // Without bf16 instructions the operands are widened, and the products are those of fp32.
  const Multiplier fp32 = cpu.avx512 ? fma5 : cpu.fma ? fma2 : none;
  if (kind == "fp32") return fp32;
  if (kind == "bf16") {
    if (cpu.amx_bf16) return {"AMX", bf16_amx, 2.0 * 16 * 16 * 32, kTiles, kBf16s};
    if (cpu.avx512_bf16) return {"AVX-512 BF16", bf16_avx512, 2.0 * 32, kChains, kBf16s};
    return fp32;
  }
  if (kind == "int8") {
    if (cpu.amx_int8) return {"AMX", int8_amx, 2.0 * 16 * 16 * 64, kTiles, kBytes};
    if (cpu.avx512_vnni) return {"AVX-512 VNNI", vnni_avx512, 2.0 * 64, kChains, kBytes};
    if (cpu.avx_vnni) return {"AVX-VNNI", vnni_avx2, 2.0 * 32, kChains, kBytes};
    if (cpu.avx512_bw) return {"AVX-512 multiply-add", madd_avx512, 2.0 * 64, kChains, kBytes};
    if (cpu.fma) return {"AVX2 multiply-add", madd_avx2, 2.0 * 32, kChains, kBytes};
    return none;
  }
  throw std::invalid_argument("kind must be fp32, bf16 or int8, got " + std::string(kind));
}

}  // namespace

double read_bandwidth(std::size_t bytes, int threads, double seconds) {
  check(threads, seconds);
  const std::size_t part = bytes / static_cast<std::size_t>(threads) / kStep * kStep;
  if (part == 0) throw std::invalid_argument("bytes must be at least 512 per thread");
  if (bytes > std::size_t{1} << 40) throw std::invalid_argument("bytes must be at most 1 TiB");
  const Buffer buffer(bytes);
  const auto read = best_reader();
  const auto touch = [&](int thread) { std::memset(buffer.data() + thread * part, 1, part); };
  const auto pass = [&](int thread) {
    read(buffer.data() + thread * part, part);
    return static_cast<double>(part);
  };
  // From the first start to the last end: threads that did not run at the same time must not look as if they had.
  double done = 0.0, start = std::numeric_limits<double>::infinity(), end = 0.0;
  for (const Share& share : run_all(threads, seconds, touch, pass)) {
    done += share.done;
    start = std::min(start, share.start);
    end = std::max(end, share.end);
  }
  return done / (end - start) / 1e9;
}

double dot_rate(const char* kind, int threads, double seconds) {
  check(threads, seconds);
  const Multiplier multiplier = best_multiplier(kind);
  if (multiplier.run == nullptr) return 0.0;
  const double operations = multiplier.operations * multiplier.chains * kRounds;
  const auto multiply = [&](int) {
    multiplier.run(multiplier.pattern);
    return operations;
  };
  // By CPU time: a neighbour that takes the core away for a while does not make its arithmetic slower.
  double rate = 0.0;
  for (const Share& share : run_all(threads, seconds, [](int) {}, multiply)) rate += share.done / share.cpu;
  return rate / 1e9;
}

const char* dot_instructions(const char* kind) { return best_multiplier(kind).name; }

}  // namespace kllm
