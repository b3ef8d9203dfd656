// The tile registers of AMX: eight, of up to 16 rows of 64 bytes, and products of one tile with another.
//
// One interface, two implementations: the instructions, and (KLLM_EMULATED_TILES) plain C++ that gives the same bits and
// aborts where a processor would raise an exception, so that what is built on tiles can be tested on any machine.
//
//   A [rows][64 bytes]   rows of activations, 4 bytes (2 bfloat16 or 4 int8) a column group
//   B [groups][64 bytes] a piece of a panel: line g holds column group g of 16 rows of weights
//   C [rows][16]         float32 or int32 sums: C[r][n] += dot of A's row r and B's column n
#pragma once

#include <cstdint>

#include "simd.h"

#if defined(KLLM_EMULATED_TILES)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#endif

namespace kllm::KLLM_ISA {

constexpr int kTileRows = 16, kTileRowBytes = 64, kTileCount = 8;

// As ldtilecfg reads it. A tile with 0 rows is not in use.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int bytes) {
    rows[tile] = (uint8_t)tile_rows;
    row_bytes[tile] = (uint16_t)bytes;
  }
};
static_assert(sizeof(TileConfig) == 64);

#if !defined(KLLM_EMULATED_TILES)

// Assembly, not intrinsics: gcc 12's _tile_loadconfig declares only 8 of the 64 bytes as read, so that the stores to the
// others are dropped and the first tile load dies with SIGILL.
KLLM_INLINE void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
KLLM_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int T>
KLLM_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

// Rows `stride` bytes apart. Ordered after every store to memory that comes before it.
template <int T>
KLLM_INLINE void load_tile(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}

// The same of what is read again only after much else: it leaves what is in the first-level cache there.
template <int T>
KLLM_INLINE void stream_tile(const void* from, size_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
KLLM_INLINE void store_tile(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}

// C += A x B of bfloat16 pairs
template <int C, int A, int B>
KLLM_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// C += A x B of bytes, signed (s) and unsigned (u) ones, A's first; exact
template <int C, int A, int B>
KLLM_INLINE void tile_dot_s8u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
KLLM_INLINE void tile_dot_u8s8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
KLLM_INLINE void tile_dot_s8s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#else

// The tiles of this thread.
struct TileFile {
  TileConfig config;
  alignas(64) uint8_t data[kTileCount][kTileRows][kTileRowBytes];

  int rows(int tile) const { return config.rows[tile]; }
  int bytes(int tile) const { return config.row_bytes[tile]; }
};

inline TileFile& tile_file() {
  static thread_local TileFile file = [] {
    TileFile released{};
    released.config.palette = 0;
    return released;
  }();
  return file;
}

inline void need_tiles(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "tiles: %s\n", what);
  abort();
}

inline void configure_tiles(const TileConfig& config) {
  need_tiles(config.palette == 1 && config.start_row == 0, "palette 1 and start row 0 are expected");
  for (uint8_t byte : config.reserved) need_tiles(byte == 0, "reserved bytes must be 0");
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = config.rows[tile], bytes = config.row_bytes[tile];
    need_tiles(rows <= kTileRows && bytes <= kTileRowBytes && (rows == 0) == (bytes == 0), "a tile has no such size");
    need_tiles(tile < kTileCount || rows == 0, "there are eight tiles");
  }
  tile_file() = {config, {}};
}

inline void release_tiles() {
  tile_file() = {};
  tile_file().config.palette = 0;
}

inline TileFile& tiles_with(int tile) {
  TileFile& file = tile_file();
  need_tiles(file.config.palette == 1 && file.rows(tile) > 0, "a tile is used that is not configured");
  return file;
}

template <int T>
inline void zero_tile() {
  memset(tiles_with(T).data[T], 0, sizeof(tile_file().data[T]));
}

template <int T>
inline void load_tile(const void* from, size_t stride) {
  zero_tile<T>();
  TileFile& file = tiles_with(T);
  for (int row = 0; row < file.rows(T); ++row) memcpy(file.data[T][row], (const uint8_t*)from + row * stride, file.bytes(T));
}

template <int T>
inline void stream_tile(const void* from, size_t stride) { load_tile<T>(from, stride); }

template <int T>
inline void store_tile(void* to, size_t stride) {
  const TileFile& file = tiles_with(T);
  for (int row = 0; row < file.rows(T); ++row) memcpy((uint8_t*)to + row * stride, file.data[T][row], file.bytes(T));
}

// A product's tiles, whose sizes must fit.
struct TileProduct {
  uint8_t (*c)[kTileRowBytes];
  const uint8_t (*a)[kTileRowBytes];
  const uint8_t (*b)[kTileRowBytes];
  int rows, groups, columns;
};

inline TileProduct tile_product(int c, int a, int b) {
  tiles_with(c), tiles_with(a);
  TileFile& file = tiles_with(b);
  need_tiles(c != a && c != b && a != b, "a product needs three tiles");
  need_tiles(file.rows(c) == file.rows(a) && file.bytes(c) == file.bytes(b), "the sums do not fit the factors");
  need_tiles(file.bytes(a) % 4 == 0 && file.bytes(a) / 4 == file.rows(b), "the factors do not fit each other");
  return {file.data[c], file.data[a], file.data[b], file.rows(c), file.rows(b), file.bytes(c) / 4};
}

// Operation of TDPBF16PS in Intel's Software Developer's Manual: the first and the second numbers of the pairs have a sum
// each, both starting at 0; only the sum of these two is added to C. The caller has set denormals to be flushed.
__attribute__((noinline)) inline void add_bf16_rows(const TileProduct& tiles) {
  for (int row = 0; row < tiles.rows; ++row) {
    float sums[2 * kTileRows] = {};
    for (int group = 0; group < tiles.groups; ++group) {
      uint16_t a[2], b[2 * kTileRows];
      memcpy(a, tiles.a[row] + 4 * group, sizeof(a));
      memcpy(b, tiles.b[group], sizeof(b));
      for (int i = 0; i < 2 * tiles.columns; ++i)
        sums[i] = std::fma(bf16_to_float(a[i % 2]), bf16_to_float(b[i]), sums[i]);
    }
    float c[kTileRows];
    memcpy(c, tiles.c[row], sizeof(c));
    for (int column = 0; column < tiles.columns; ++column) c[column] = c[column] + (sums[2 * column] + sums[2 * column + 1]);
    memcpy(tiles.c[row], c, sizeof(c));
  }
}

// The instruction rounds to nearest even and takes denormals as zero, whatever MXCSR says.
template <int C, int A, int B>
inline void tile_dot_bf16() {
  constexpr unsigned kNoExceptions = 0x1f80, kDenormalsAreZero = 0x40, kFlushToZero = 0x8000;
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(kNoExceptions | kDenormalsAreZero | kFlushToZero);
  add_bf16_rows(tile_product(C, A, B));
  _mm_setcsr(saved);
}

template <class RowByte, class ColumnByte>
inline void add_bytes(const TileProduct& tiles) {
  for (int row = 0; row < tiles.rows; ++row)
    for (int column = 0; column < tiles.columns; ++column) {
      int32_t sum;
      memcpy(&sum, tiles.c[row] + 4 * column, 4);
      for (int group = 0; group < tiles.groups; ++group)
        for (int byte = 0; byte < 4; ++byte)
          sum += (RowByte)tiles.a[row][4 * group + byte] * (ColumnByte)tiles.b[group][4 * column + byte];
      memcpy(tiles.c[row] + 4 * column, &sum, 4);
    }
}

template <int C, int A, int B>
inline void tile_dot_s8u8() { add_bytes<int8_t, uint8_t>(tile_product(C, A, B)); }
template <int C, int A, int B>
inline void tile_dot_u8s8() { add_bytes<uint8_t, int8_t>(tile_product(C, A, B)); }
template <int C, int A, int B>
inline void tile_dot_s8s8() { add_bytes<int8_t, int8_t>(tile_product(C, A, B)); }

#endif

// Sets up the tiles of this thread as long as it lives.
struct TilesInUse {
  explicit TilesInUse(const TileConfig& config) { configure_tiles(config); }
  ~TilesInUse() { release_tiles(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

}  // namespace kllm::KLLM_ISA
