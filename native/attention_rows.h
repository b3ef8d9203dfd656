// What rows of queries do with a tile of keys, and the memory it takes.
//
//   float32 cache    all in float32
//   bfloat16 cache   q and, with AVX512_BF16, probabilities rounded to bfloat16, products summed in float32
//   int8 cache       with AVX-512: q and probabilities as bytes, one or (`exact`) two each; else as float32
#pragma once

#include "kv_tile.h"
#include "online_softmax.h"

namespace kllm::KLLM_ISA {

// Rows that share a tile: their queries and sums stay in the second-level cache, of processors with AMX 2 MB.
#if defined(KLLM_TILES)
constexpr int kPassRows = 384;
#else
constexpr int kPassRows = 192;
#endif

// Sums of rows over some keys: result = weighted / total, relative to 2^maximum.
struct Sums {
  float* weighted;  // [rows, dims]
  float* total;     // [rows, 16]
  float* maximum;   // [rows]

  Sums from(int row, int dims) const { return {weighted + (size_t)row * dims, total + row * kLanes, maximum + row}; }
};

// The dimension that lane `lane` (a multiple of 4) of the line that starts at `first` stands for.
template <Type kType>
inline int dim_of_lane(int first, int lane) {
  if (CacheTraits<kType>::ValueDot::kDepth < 4) return first + lane;
  return first / 64 * 64 + lane * 4 + first % 64 / 4;  // interleave8
}

class Carver {
 public:
  explicit Carver(void* base) : base_((uint8_t*)base) {}
  template <class T>
  T* take(size_t count) {
    size_t at = bytes_;
    bytes_ += (count * sizeof(T) + 63) / 64 * 64;
    return base_ ? (T*)(base_ + at) : nullptr;
  }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* base_;
  size_t bytes_ = 0;
};

// What products by tile instructions (attention_tiles.h) need besides. In turns: of two blocks of 16 rows.
struct TiledWorkspace {
  static constexpr int kRows = 16;
  static constexpr int kHeads = 16;  // for so many there is room in `columns`

  uint8_t* columns;     // [kHeads][dims / 2] lines of 16 pairs of bfloat16: q transposed
  uint8_t* by_key;      // [64] lines of 16 scores of a key; or [16, dims] sums
  float* scores[2];     // [16, 64]
  uint8_t* p;           // [16] rows of probabilities, 256 bytes each
  uint8_t* weighted[2]; // [16, dims] sums of a tile
};

struct Workspace {
  int capacity;     // KV heads times queries that a pass has room for
  uint8_t* q;       // [rows] padded queries, as the product wants them
  float* scales;    // [rows] of the scores, log2(e) included
  int32_t* starts;  // [rows, bytes] int8 cache: of the sums of q times bytes, for their being unsigned
  int* limits;      // [rows] context
  Sums part, whole;
  float* scores;    // [kRowBlock, 64]
  uint8_t* p;       // [kRowBlock] rows of probabilities, 256 bytes each
  KvTile tile;
  TiledWorkspace tiled;
  static constexpr int kApart = 576;  // bytes: loads do not wait for stores at the same place of another page
  size_t bytes;

  Workspace(void* base, int group, int head_dim, Type type) {
    Carver carver(base);
    const size_t dims = padded_dim(head_dim, type);
    capacity = group < kPassRows ? kPassRows / group : 1;
    const size_t surplus = tiled_type(type) ? TiledWorkspace::kRows : 0;  // read and not looked at
    const size_t rows = (size_t)capacity * group;
    q = carver.take<uint8_t>((rows + surplus) * dims * 4);
    scales = carver.take<float>(rows);
    starts = carver.take<int32_t>(rows * 2);
    limits = carver.take<int>(rows + surplus);
    for (Sums* sums : {&part, &whole}) {
      *sums = {carver.take<float>(rows * dims), carver.take<float>(rows * kLanes), carver.take<float>(rows)};
    }
    scores = carver.take<float>(kRowBlock * kTileKeys);
    p = carver.take<uint8_t>(kRowBlock * kTileKeys * 4);
    tile.keys = carver.take<uint8_t>(dims * kTileKeys * 4 + kApart);
    tile.values = carver.take<uint8_t>(dims * kTileKeys * 4 + kApart);
    for (float** scales : {&tile.key_scales, &tile.value_scales, &tile.value_logs, &tile.value_inverses}) {
      *scales = carver.take<float>(kTileKeys);
    }
    tile.copies = carver.take<uint8_t>(2 * kTileKeys * dims * size_of(type));
    tile.blank = carver.take<uint8_t>(dims * size_of(type));
    if (tiled_type(type)) {
      constexpr int kRows = TiledWorkspace::kRows;
      tiled.columns = carver.take<uint8_t>(TiledWorkspace::kHeads * dims / 2 * 64 + kApart);
      tiled.by_key = carver.take<uint8_t>((dims < kTileKeys ? kTileKeys : dims) * 64 + kApart);
      tiled.p = carver.take<uint8_t>(kRows * kTileKeys * 4 + kApart);
      for (int i = 0; i < 2; ++i) {
        tiled.scores[i] = carver.take<float>(kRows * kTileKeys + kApart / 4);
        tiled.weighted[i] = carver.take<uint8_t>(kRows * dims * 4 + kApart);
      }
    }
    bytes = carver.bytes();
  }
};

constexpr float kLog2E = 1.44269504088896341f;

// q [head_dim] as rows of bytes, kBytes of them: q = scale (high + low / 254), to 1 / 254 of what one row gives.
template <int kBytes>
inline void put_byte_query(const Workspace& work, int row, const float* q, int head_dim, int dims, float scale) {
  vf peak = zero();
  auto at = [&](int i) {
    const int left = head_dim - i;
    return left >= kLanes ? load(q + i) : left > 0 ? load_n(q + i, left) : zero();
  };
  for (int i = 0; i < dims; i += kLanes) peak = max(peak, abs(at(i)));
  const float unit = top(peak) / 127.0f;
  const vf inverse = set1(unit > 0 ? 1.0f / unit : 0.0f);
  int8_t* bytes = (int8_t*)work.q + (size_t)row * kBytes * dims;
  vi sums[2] = {izero(), izero()};
  for (int i = 0; i < dims; i += kLanes) {
    vf x = min(max(at(i) * inverse, set1(-127.0f)), set1(127.0f)), whole = round(x);
    vi parts[2] = {to_int(whole), to_int((x - whole) * set1(254.0f))};
    for (int part = 0; part < kBytes; ++part) {
      store_i8(bytes + part * dims + i, parts[part]);
      sums[part] = sums[part] + parts[part];
    }
  }
  work.scales[row] = scale * kLog2E * unit;
  for (int part = 0; part < kBytes; ++part) work.starts[row * kBytes + part] = -128 * isum(sums[part]);
}

template <Type kType, bool kExact>
inline void put_query(const Workspace& work, int row, const float* q, int head_dim, int dims, float scale) {
  constexpr int kDepth = CacheTraits<kType>::KeyDot::kDepth;
  if constexpr (kDepth == 4) return put_byte_query<kExact ? 2 : 1>(work, row, q, head_dim, dims, scale);
  work.scales[row] = scale * kLog2E;
  uint8_t* to = work.q + (size_t)row * dims * 4 / kDepth;
  for (int i = 0; i < dims; i += kLanes) {
    const int left = head_dim - i;
    vf x = left >= kLanes ? load(q + i) : left > 0 ? load_n(q + i, left) : zero();
    if constexpr (kDepth == 2) {
      store_bf16((uint16_t*)to + i, x);
    } else {
      store((float*)to + i, kType == Type::kBF16 ? round_bf16(x) : x);
    }
  }
}

// The rows of one KV head and what they do with its tile. Rows are counted from the head's first in `sums`, and from
// `base` in the workspace. kExact: of an int8 cache, two bytes of q and of probabilities instead of one.
template <Type kType, bool kExact>
struct RowsOfTile {
  using KeyDot = typename CacheTraits<kType>::KeyDot;
  using ValueDot = typename CacheTraits<kType>::ValueDot;
  using Cache = CacheLines<kType>;
  static constexpr int kDepth = KeyDot::kDepth;
  static constexpr bool kBytes = kDepth == 4;                        // rows are bytes
  static constexpr int kProducts = kBytes && kExact ? 2 : 1;         // rows of bytes that make one
  static constexpr float kTopByte = kProducts == 2 ? 65280 : 255;    // of probabilities
  static constexpr float kTopLog = kProducts == 2 ? 15.994353437f : 7.994353437f;  // log2 of it
  static constexpr bool kCoarse = kDepth == 2 || (kBytes && !kExact);
  static constexpr bool kScaled = kType == Type::kI8;
  static constexpr int kBlock = kRowBlock / kProducts;
  static constexpr size_t kPStride = kTileKeys * 4 / kDepth;

  const Workspace& work;
  const int dims;
  const int start;  // position of the tile's first key
  const int base;
  const Sums sums;
  TileBuilder<kType>& tile;

  // Rows [row, end). The tile has been selected.
  void attend(int row, int end) const {
    if (Cache::kSteps == 1 && end - row <= kBlock) {
      attend_some<true>(row, end);
    } else {
      tile.build();
      attend_some<false>(row, end);
    }
  }

 protected:
  template <bool kDirect>
  void attend_some(int row, int end) const {
    for (; row + kBlock <= end; row += kBlock) attend_rows<kBlock, kDirect>(row);
    switch (end - row) {
      case 5: return attend_few<5, kDirect>(row);
      case 4: return attend_few<4, kDirect>(row);
      case 3: return attend_few<3, kDirect>(row);
      case 2: return attend_few<2, kDirect>(row);
      case 1: return attend_few<1, kDirect>(row);
    }
  }

  template <int kRows, bool kDirect>
  void attend_few(int row) const {
    if constexpr (kRows < kBlock) attend_rows<kRows, kDirect>(row);
  }

  int visible(int row) const {
    int keys = work.limits[base + row] - start;
    return keys < kTileKeys ? keys : kTileKeys;
  }

  template <int kRows, bool kDirect>
  void attend_rows(int row) const {
    const int keys = visible(row + kRows - 1);
    score<kRows, kDirect>(row, (keys + kLanes - 1) / kLanes);
    Maxima maxima;
    if (visible(row) == kTileKeys) {
      softmax<kRows, false>(row, maxima);
    } else {
      softmax<kRows, true>(row, maxima);
    }
    float* out = sums.weighted + (size_t)row * dims;
    if constexpr (kBytes) {
      weigh<kRows, kDirect>(keys, AddInts<kProducts>{out, (size_t)dims, maxima.factors, maxima.gains});
    } else {
      weigh<kRows, kDirect>(keys, AddFloats{{out, (size_t)dims}, maxima.factors});
    }
  }

  // Adds the values of `keys` keys, weighted.
  template <int kRows, bool kDirect, class End>
  void weigh(int keys, const End& end) const {
    const int steps = (keys + kDepth - 1) / kDepth;
    const TileRows p{work.p, kPStride};
    if constexpr (kDirect) {
      const int ask = 1 + tile.values_ahead.lines() / (steps * ((dims + 63) / 64));
      CachedValues<kType> values{tile.values, tile.values_ahead, ask};
      multiply<ValueDot, kRows * kProducts>(steps, p, values, dims / kLanes, end);
      values.ahead.ask_all();
    } else {
      TileLines values{work.tile.values, (size_t)dims * 4};
      multiply<ValueDot, kRows * kProducts>(steps, p, values, dims / kLanes, end);
    }
  }

  // Products of rows and keys to work.scores.
  template <int kRows, bool kDirect>
  void score(int row, int lines) const {
    const size_t stride = (size_t)dims * 4 / kDepth;
    const TileRows q{work.q + (size_t)(base + row) * kProducts * stride, stride};
    if constexpr (kBytes) {
      const int32_t* starts = work.starts + (base + row) * kProducts;
      score_to<kRows, kDirect>(q, lines, SetInts{(int32_t*)work.scores, kTileKeys, starts});
    } else {
      score_to<kRows, kDirect>(q, lines, SetFloats{work.scores, kTileKeys});
    }
  }

  template <int kRows, bool kDirect, class End>
  void score_to(TileRows q, int lines, End end) const {
    if constexpr (kDirect) {
      score_cached<kRows * kProducts>(q, lines, end);
    } else {
      TileLines keys{work.tile.keys, kKeyLines * 64};
      multiply<KeyDot, kRows * kProducts>(dims / kDepth, q, keys, lines, end);
    }
  }

  // The same from the cache: keys are transposed in registers, two lines at a time for the latency of the sums.
  template <int kRows, class End>
  void score_cached(TileRows q, int lines, End end) const {
    const int pieces = dims * (int)Cache::kSize / 16;
    Ahead ahead = tile.keys_ahead;
    const int ask = 1 + ahead.lines() / (pieces * ((lines + 1) / 2));
    for (int line = 0; line < lines; line += 2, end.skip(2)) {
      typename KeyDot::Sum acc[kRows][2];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = end.begin(r, 0);
      for (int piece = 0; piece < pieces; ++piece) {
        vw words[2][4];
        Cache::transposed(tile.keys + line * kLanes, piece, words[0]);
        Cache::transposed(tile.keys + (line + 1) * kLanes, piece, words[1]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            typename KeyDot::Word x = KeyDot::spread(q.data + r * q.stride + piece * 16 + i * 4);
            acc[r][0] = KeyDot::dot(acc[r][0], KeyDot::line(words[0][i]), x);
            acc[r][1] = KeyDot::dot(acc[r][1], KeyDot::line(words[1][i]), x);
          }
        }
        ahead.ask(ask);
      }
      end.end(acc);
    }
    ahead.ask_all();
  }

  // From scores to probabilities, as the next product wants them. Afterwards maxima.factors are what the sums so far
  // are multiplied with and, of bytes, maxima.gains what one of them is worth.
  template <int kRows, bool kSomeMasked>
  KLLM_APART void softmax(int row, Maxima& maxima) const {
    raise(row, kRows, exponents<kRows, kSomeMasked>(row, work.scores), maxima);
    vf shares[kKeyLines];
    load_shares(shares);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) weights_of(r, row, maxima, shares, work.scores, work.p);
  }

  // here: the largest exponents of the rows from `row` on.
  KLLM_INLINE void raise(int row, int count, vf here, Maxima& maxima) const {
    maxima.raise(sums.maximum + row, count, here);
    if constexpr (kBytes) store(maxima.gains, rescalings(load(maxima.tile), load(maxima.after)) * set1(1 / kTopByte));
  }

  // Of values: of bytes in the sum, else in the weights.
  KLLM_INLINE void load_shares(vf (&shares)[kKeyLines]) const {
    for (int i = 0; i < kKeyLines && kScaled; ++i) {
      shares[i] = load((kBytes ? work.tile.value_inverses : work.tile.value_scales) + i * kLanes);
    }
  }

  // Of the r-th row from `row` on: probabilities from exponents, and their sum to that of the row.
  KLLM_INLINE void weights_of(int r, int row, const Maxima& maxima, const vf (&shares)[kKeyLines], const float* exponents,
                              uint8_t* p) const {
    float* const total = sums.total + (size_t)(row + r) * kLanes;
    const vf factor = set1(maxima.factors[r]);
    exponents += r * kProducts * kTileKeys;
    p += r * kProducts * kPStride;
    if constexpr (kBytes) {
      const vf seen = byte_probabilities(exponents, p, set1(maxima.tile[r] - kTopLog), shares);
      store(total, fma(load(total), factor, seen * set1(maxima.gains[r])));
    } else {
      store(total, fma(load(total), factor, probabilities(exponents, p, set1(maxima.after[r]), shares)));
    }
  }

  // Scores to exponents of two in their place. Of bytes that of the value's scale is included, so that the largest
  // exponent belongs to the largest weight. Returns the largest of every row.
  template <int kRows, bool kSomeMasked>
  KLLM_INLINE vf exponents(int row, float* scores) const {
    vf peaks[kRows], scales[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) peaks[r] = set1(kMasked), scales[r] = set1(work.scales[base + row + r]);
#pragma GCC unroll 4
    for (int i = 0; i < kKeyLines; ++i) {
      const vf key_scales = kScaled ? load(work.tile.key_scales + i * kLanes) : zero();
      const vf logs = kBytes ? load(work.tile.value_logs + i * kLanes) : zero();
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float* const at = scores + r * kProducts * kTileKeys + i * kLanes;
        vf x = score(at);
        if constexpr (kScaled) x = x * key_scales;
        x = kBytes ? fma(x, scales[r], logs) : x * scales[r];
        if constexpr (kSomeMasked) x = first_n(x, visible(row + r) - i * kLanes, set1(kMasked));
        store(at, x);
        peaks[r] = max(peaks[r], x);
      }
    }
    return tops(peaks);
  }

  static KLLM_INLINE vf score(const float* at) {
    if constexpr (!kBytes) return load(at);
    const int32_t* sums = (const int32_t*)at;
    if constexpr (kProducts == 1) return to_float(iload(sums));
    return fma(to_float(iload(sums + kTileKeys)), set1(1.0f / 254), to_float(iload(sums)));
  }

  // 2^(exponents - of), for the next product. Returns their sum in every lane.
  KLLM_INLINE vf probabilities(const float* exponents, uint8_t* to, vf of, const vf (&scales)[kKeyLines]) const {
    vf p[kKeyLines];
#pragma GCC unroll 4
    for (int i = 0; i < kKeyLines; ++i) {
      p[i] = power2<kCoarse>(load(exponents + i * kLanes) - of);
      const vf weight = kScaled ? p[i] * scales[i] : p[i];
      if constexpr (kDepth == 2) {
        store_bf16((uint16_t*)to + i * kLanes, weight);
      } else {
        store((float*)to + i * kLanes, weight);
      }
    }
    return (p[0] + p[1]) + (p[2] + p[3]);
  }

  // The same as bytes. In the sum values have no scale: `inverses` take it off.
  KLLM_INLINE vf byte_probabilities(const float* exponents, uint8_t* to, vf of, const vf (&inverses)[kKeyLines]) const {
    vi p[kKeyLines];
    vf seen[2] = {zero(), zero()};
#pragma GCC unroll 4
    for (int i = 0; i < kKeyLines; ++i) {
      vf x = power2<kCoarse>(load(exponents + i * kLanes) - of);
      if constexpr (kProducts == 2) x = min(set1(kTopByte), x);  // `of` is rounded, and two bytes do not saturate
      seen[i % 2] = fma(x, inverses[i], seen[i % 2]);
      p[i] = to_int(x);
    }
#if defined(__AVX512F__)
    if constexpr (kProducts == 2) {
      for (int i = 0; i < kKeyLines; ++i) split_bytes(p[i], to + kPStride + i * kLanes, to + i * kLanes);
    } else {
      wstore(to, join_bytes(p));
    }
#endif
    return seen[0] + seen[1];
  }
};

}  // namespace kllm::KLLM_ISA
