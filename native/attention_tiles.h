// What rows of queries do with a tile of keys where there is AMX: both products by tile instructions, sixteen rows at a time.
//
//   scores    rows of q (A) x keys (B), which have been transposed for many rows; for a few of bfloat16, keys as they lie in
//             the cache (A) x q transposed (B): the same products, added in the same order
//   values    rows of probabilities (A) x values (B)
//
// Softmax is that of attention_rows.h. Products of bytes are exact, so an int8 cache gives the bits of AVX-512, and a few rows
// are left to that, which is faster for them.
#pragma once

#include "attention_rows.h"
#include "tiles.h"

namespace kllm::KLLM_ISA {

// Tiles 0 .. 3: sums of four lines; 4, 5: A; 6, 7: B. All are whole: what surplus rows and columns give is not looked at.
inline TileConfig attention_tiles() {
  TileConfig config;
  for (int tile = 0; tile < kTileCount; ++tile) config.set(tile, kTileRows, kTileRowBytes);
  return config;
}

template <Type kType>
struct ScoreTiles {
  template <int C, int A, int B>
  static KLLM_INLINE void dot() {
    if constexpr (kType == Type::kI8) tile_dot_s8s8<C, A, B>();
    else tile_dot_bf16<C, A, B>();
  }
};

template <Type kType>
struct ValueTiles {
  template <int C, int A, int B>
  static KLLM_INLINE void dot() {
    if constexpr (kType == Type::kI8) tile_dot_u8s8<C, A, B>();
    else tile_dot_bf16<C, A, B>();
  }
};

// 2^x for x <= 0, to 1e-4, and not below 2^-125. Without the instructions for it, which only one unit has.
KLLM_INLINE vf power2_coarse(vf x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: floats from here on have no fraction
  x = max(set1(-125.0f), x);  // in this order NaN stays
  const vf shifted = x + set1(kWhole), r = x - (shifted - set1(kWhole));
  vf p = fma(set1(5.500892866e-02f), r, set1(2.422109601e-01f));
  p = fma(fma(p, r, set1(6.932829276e-01f)), r, set1(1.0f));
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23)))};
}

// A piece of memory that tiles are read from: 64 bytes of each of 16 rows, the next 64 bytes `step` further on.
struct TileLoads {
  const uint8_t* data;
  size_t stride, step;

  template <int T>
  KLLM_INLINE void load(int index) const { load_tile<T>(data + index * step, stride); }
};

template <int kCount>
KLLM_INLINE void zero_sums() {
  if constexpr (kCount > 0) zero_tile<0>();
  if constexpr (kCount > 1) zero_tile<1>();
  if constexpr (kCount > 2) zero_tile<2>();
  if constexpr (kCount > 3) zero_tile<3>();
}

// To four lines of rows `stride` bytes apart, or one below the other.
template <int kCount>
KLLM_INLINE void store_sums(uint8_t* out, size_t stride, size_t apart) {
  if constexpr (kCount > 0) store_tile<0>(out, stride);
  if constexpr (kCount > 1) store_tile<1>(out + apart, stride);
  if constexpr (kCount > 2) store_tile<2>(out + 2 * apart, stride);
  if constexpr (kCount > 3) store_tile<3>(out + 3 * apart, stride);
}

// sums [16, lines] = rows x lines; lines: those of a step side by side. out: 16 rows of `stride` bytes.
template <class Dot, int kLines>
KLLM_INLINE void multiply_rows(TileLoads rows, TileLoads lines, int steps, void* out, size_t stride) {
  zero_sums<kLines>();
  for (int step = 0; step < steps; ++step) {
    rows.load<4>(step);
    const TileLoads at{lines.data + step * lines.step, lines.stride, 64};
    if constexpr (kLines > 0) at.load<6>(0), Dot::template dot<0, 4, 6>();
    if constexpr (kLines > 1) at.load<7>(1), Dot::template dot<1, 4, 7>();
    if constexpr (kLines > 2) at.load<6>(2), Dot::template dot<2, 4, 6>();
    if constexpr (kLines > 3) at.load<7>(3), Dot::template dot<3, 4, 7>();
  }
  store_sums<kLines>((uint8_t*)out, stride, 64);
}

template <class Dot>
inline void multiply_rows(TileLoads rows, TileLoads lines, int steps, int count, void* out, size_t stride) {
  switch (count) {
    case 1: return multiply_rows<Dot, 1>(rows, lines, steps, out, stride);
    case 2: return multiply_rows<Dot, 2>(rows, lines, steps, out, stride);
    case 3: return multiply_rows<Dot, 3>(rows, lines, steps, out, stride);
    default: return multiply_rows<Dot, 4>(rows, lines, steps, out, stride);
  }
}

// Sums of four lines of 16 keys each (A), as they lie in the cache, times q transposed: [16 keys, 16 columns] a line.
template <class Dot, int kLines>
KLLM_INLINE void multiply_keys(const TileLoads (&keys)[kKeyLines], const uint8_t* columns, int steps, uint8_t* out) {
  zero_sums<kLines>();
  for (int step = 0; step < steps; ++step) {
    load_tile<6>(columns + step * kTileRows * kTileRowBytes, kTileRowBytes);
    if constexpr (kLines > 0) keys[0].load<4>(step), Dot::template dot<0, 4, 6>();
    if constexpr (kLines > 1) keys[1].load<5>(step), Dot::template dot<1, 5, 6>();
    if constexpr (kLines > 2) keys[2].load<4>(step), Dot::template dot<2, 4, 6>();
    if constexpr (kLines > 3) keys[3].load<5>(step), Dot::template dot<3, 5, 6>();
  }
  store_sums<kLines>(out, kTileRowBytes, kTileRows * kTileRowBytes);
}

template <class Dot>
inline void multiply_keys(const TileLoads (&keys)[kKeyLines], int lines, const uint8_t* columns, int steps, uint8_t* out) {
  switch (lines) {
    case 1: return multiply_keys<Dot, 1>(keys, columns, steps, out);
    case 2: return multiply_keys<Dot, 2>(keys, columns, steps, out);
    case 3: return multiply_keys<Dot, 3>(keys, columns, steps, out);
    default: return multiply_keys<Dot, 4>(keys, columns, steps, out);
  }
}

// Rows up to this many meet bfloat16 keys as they lie in the cache.
constexpr int kColumns = 8;

inline uint8_t* columns_of(const Workspace& work, int head, int dims) {
  return work.tiled.columns + (size_t)head * (dims / 2) * kTileRowBytes;
}

// q of a head's `rows` rows of `words` words: [words] lines with a row in each lane.
inline void transpose_query(const uint8_t* q, int rows, int words, uint8_t* columns) {
  for (int row = 0; row < rows; ++row)
    for (int word = 0; word < words; ++word)
      memcpy(columns + word * kTileRowBytes + row * 4, q + ((size_t)row * words + word) * 4, 4);
}

template <Type kType, bool kExact>
struct TiledRows : RowsOfTile<kType, kExact> {
  using Base = RowsOfTile<kType, kExact>;
  using Base::base, Base::dims, Base::start, Base::sums, Base::tile, Base::visible, Base::work;
  using Base::kBytes, Base::kDepth, Base::kProducts, Base::kPStride;
  static constexpr int kBlock = kTileRows / kProducts;
  static constexpr int kFew = kRowBlock / kProducts;  // rows whose exponents are computed together

  // Rows [row, end); columns: the head's q transposed, or null. The tile has been selected. Each product is begun before
  // softmax of the block before it, since the units that do them work side by side.
  void attend(int row, int end, const uint8_t* columns) const {
    const int keys = visible(end - 1), lines = (keys + kLanes - 1) / kLanes;
    if (columns) {
      score_cached(row, end, lines, columns);
    } else {
      tile.build_keys();
      score(row, lines, work.tiled.scores[0]);
    }
    tile.build_values();
    Maxima maxima[2];
    int block = 0;
    for (; row < end; row += kBlock, ++block) {
      const int turn = block % 2;
      const int count = end - row < kBlock ? end - row : kBlock;
      if (row + kBlock < end) score(row + kBlock, lines, work.tiled.scores[!turn]);
      softmax(row, count, work.tiled.scores[turn], maxima[turn]);
      if (kBytes || visible(row) >= tile.count() || tile.values_are_finite()) weigh(keys, work.tiled.weighted[turn]);
      else weigh_apart(row, count, keys, work.tiled.weighted[turn]);
      if (block > 0) add(row - kBlock, kBlock, work.tiled.weighted[!turn], maxima[!turn]);
      if (row + count == end) add(row, count, work.tiled.weighted[turn], maxima[turn]);
    }
  }

 private:
  static constexpr int kStepBytes = kTileRowBytes;

  int steps() const { return dims * 4 / kDepth / kStepBytes; }

  // Products of q from `row` on with the keys of so many lines.
  void score(int row, int lines, float* scores) const {
    const size_t stride = (size_t)dims * 4 / kDepth;
    const TileLoads q{work.q + (size_t)(base + row) * kProducts * stride, stride, kStepBytes};
    const TileLoads keys{work.tile.keys, kKeyLines * 64, kKeyLines * 64 * kTileRows};
    multiply_rows<ScoreTiles<kType>>(q, keys, steps(), lines, scores, kTileKeys * sizeof(float));
  }

  // The same of few rows, all of the block, from keys in the cache.
  void score_cached(int row, int end, int lines, const uint8_t* columns) const {
    TileLoads keys[kKeyLines];
    for (int line = 0; line < lines; ++line) keys[line] = line_of_keys(line);
    multiply_keys<ScoreTiles<kType>>(keys, lines, columns, steps(), work.tiled.by_key);
    const int first = row, rows = end - row;
    for (int line = 0; line < lines; ++line) {
      const uint8_t* at = work.tiled.by_key + line * kLanes * kTileRowBytes;
      for (int piece = first / 4; piece * 4 < first + rows; ++piece) {
        vw words[4];
        transpose_piece(at + piece * 16, words);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int to = piece * 4 + i - first;
          if (to >= 0 && to < rows) wstore(work.tiled.scores[0] + to * kTileKeys + line * kLanes, words[i]);
        }
      }
    }
  }

  // 16 bytes of each of 16 lines, a word of each to a result.
  static KLLM_INLINE void transpose_piece(const uint8_t* at, vw (&words)[4]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const uint8_t* line = at + i * kTileRowBytes;
      words[i] = join4(line, line + 4 * kTileRowBytes, line + 8 * kTileRowBytes, line + 12 * kTileRowBytes);
    }
    transpose4(words[0], words[1], words[2], words[3]);
  }

  // Keys past the last of the tile may hold anything, as long as they are in the last one's block: nobody sees them.
  TileLoads line_of_keys(int line) const {
    const uint8_t* const* keys = tile.keys + line * kLanes;
    if (tile.whole_lines()) return {keys[0], tile.key_stride(), kStepBytes};
    const size_t bytes = dims * CacheLines<kType>::kSize;
    uint8_t* copies = work.tile.keys + line * kLanes * bytes;
    for (int i = 0; i < kLanes; ++i) memcpy(copies + i * bytes, keys[i], bytes);
    return {copies, bytes, kStepBytes};
  }

  void softmax(int row, int count, float* scores, Maxima& maxima) const {
    if constexpr (kBytes) softmax_bytes(row, count, scores, maxima);
    else if (visible(row) == kTileKeys) softmax_floats<false>(row, count, scores, maxima);
    else softmax_floats<true>(row, count, scores, maxima);
  }

  // Maxima are taken of products before they are scaled: the scale, which is above 0, is the same for all.
  template <bool kSomeMasked>
  KLLM_APART void softmax_floats(int row, int count, const float* scores, Maxima& maxima) const {
    alignas(64) float here[kTileRows + kLanes] = {};
    const vf scale = set1(work.scales[base + row]);
    for (int r = 0; r < count; r += 4) {
      vf peaks[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) peaks[i] = peak<kSomeMasked>(row + r + i, scores + (r + i) * kTileKeys);
      store(here + r, tops(peaks) * scale);
    }
    Base::raise(row, count, load(here), maxima);
    float* total = sums.total + (size_t)row * kLanes;
    uint8_t* p = work.tiled.p;
    for (int r = 0; r < count; ++r, total += kLanes, scores += kTileKeys, p += kPStride) {
      const vf top = set1(maxima.after[r]);
      const int seen = kSomeMasked ? visible(row + r) : kTileKeys;
      vf shares[kKeyLines];
#pragma GCC unroll 4
      for (int i = 0; i < kKeyLines; ++i) {
        shares[i] = power2_coarse(load(scores + i * kLanes) * scale - top);  // 0 at the top
        if constexpr (kSomeMasked) shares[i] = first_n(shares[i], seen - i * kLanes, zero());
        store_bf16((uint16_t*)p + i * kLanes, shares[i]);
      }
      store(total, fma(load(total), set1(maxima.factors[r]), (shares[0] + shares[1]) + (shares[2] + shares[3])));
    }
  }

  // The largest scores of a row, one a lane. Past the last row: of what is there.
  template <bool kSomeMasked>
  KLLM_INLINE vf peak(int row, const float* scores) const {
    vf line[kKeyLines];
#pragma GCC unroll 4
    for (int i = 0; i < kKeyLines; ++i) {
      line[i] = load(scores + i * kLanes);
      if constexpr (kSomeMasked) line[i] = first_n(line[i], visible(row) - i * kLanes, set1(kMasked));
    }
    return max(max(line[0], line[1]), max(line[2], line[3]));
  }

  // As softmax of attention_rows.h, of up to 16 rows.
  KLLM_APART void softmax_bytes(int row, int count, float* scores, Maxima& maxima) const {
    alignas(64) float here[kTileRows + kLanes] = {};
    int first = 0;
    for (; first + kFew <= count; first += kFew) exponents_of<kFew>(row + first, first, scores, here);
    for (; first < count; ++first) exponents_of<1>(row + first, first, scores, here);
    Base::raise(row, count, load(here), maxima);
    vf shares[kKeyLines];
    Base::load_shares(shares);
    for (int r = 0; r < count; ++r) Base::weights_of(r, row, maxima, shares, scores, work.tiled.p);
  }

  template <int kRows>
  KLLM_INLINE void exponents_of(int row, int first, float* scores, float* here) const {
    scores += first * kProducts * kTileKeys;
    const bool all = visible(row) == kTileKeys;
    store(here + first, all ? Base::template exponents<kRows, false>(row, scores)
                            : Base::template exponents<kRows, true>(row, scores));
  }

  // Values of the tile, weighted, to [16, dims] sums.
  void weigh(int keys, uint8_t* out) const {
    constexpr int kStepKeys = kTileRows * kDepth;
    const size_t stride = (size_t)dims * 4;
    TileLoads values{work.tile.values, stride, stride * kTileRows};
    const TileLoads p{work.tiled.p, kPStride, kStepBytes};
    for (int lines = dims / kLanes; lines > 0; lines -= 4, values.data += 256, out += 256)
      multiply_rows<ValueTiles<kType>>(p, values, (keys + kStepKeys - 1) / kStepKeys, lines, out, stride);
  }

  // The same where values that some rows do not see are not finite: 0 times those is not 0. Each row gets the values that
  // it sees; those of the tile are written again.
  KLLM_APART void weigh_apart(int row, int count, int keys, uint8_t* out) const {
    for (int r = 0, seen = 0; r < count; ++r) {
      if (visible(row + r) != seen) {
        seen = visible(row + r);
        tile.write_values(seen);
        weigh(keys, work.tiled.by_key);
      }
      memcpy(out + (size_t)r * dims * 4, work.tiled.by_key + (size_t)r * dims * 4, (size_t)dims * 4);
    }
    tile.write_values(kTileKeys);
  }

  // Adds what weigh() has left of `count` rows.
  KLLM_APART void add(int row, int count, const uint8_t* weighted, const Maxima& maxima) const {
    for (int r = 0; r < count; ++r) {
      float* const to = sums.weighted + (size_t)(row + r) * dims;
      const vf factor = set1(maxima.factors[r]), gain = set1(maxima.gains[r]);
      const size_t from = (size_t)r * kProducts * dims;
      for (int i = 0; i < dims; i += kLanes) {
        if constexpr (kBytes) {
          const int32_t* ints = (const int32_t*)weighted + from + i;
          vi sum = iload(ints);
          if constexpr (kProducts == 2) sum = sum * iset1(256) + iload(ints + dims);
          store(to + i, fma(load(to + i), factor, to_float(sum) * gain));
        } else {
          store(to + i, fma(load(to + i), factor, load((const float*)weighted + from + i)));
        }
      }
    }
  }
};

}  // namespace kllm::KLLM_ISA
