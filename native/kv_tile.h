// Sixty-four cached tokens of one KV head, brought from the paged cache into the layout of tile_product.h.
//
//   keys     [head_dim / depth][4 lines]            lane = key: scores of 16 keys a line
//   values   [64 / depth][head_dim / 16 lines]      lane = dimension; of int8, in the order of interleave8
//
// Tiles start at multiples of 64 tokens of the context, whatever the task. Nothing past the task's last cached token is
// read: that memory may hold anything.
#pragma once

#include "kernels.h"
#include "tile_product.h"

namespace kllm::KLLM_ISA {

constexpr int kTileKeys = 64;
constexpr int kKeyLines = kTileKeys / kLanes;
constexpr int kTilesAhead = 2;  // whose memory has been asked for

// Whether products with a cache of this type are done by tile instructions (attention_tiles.h).
#if defined(__AMX_TILE__) || defined(KLLM_EMULATED_TILES)
#define KLLM_TILES
template <Type kType>
constexpr bool kTiled = kType != Type::kF32;
#else
template <Type kType>
constexpr bool kTiled = false;
#endif

template <Type kType>
struct CacheTraits;

template <>
struct CacheTraits<Type::kF32> {
  using KeyDot = FloatDot;
  using ValueDot = FloatDot;
};
template <>
struct CacheTraits<Type::kBF16> {
#if defined(__AVX512BF16__)
  using KeyDot = PairDot;
  using ValueDot = PairDot;
#else
  using KeyDot = FloatDot;
  using ValueDot = FloatDot;
#endif
};
template <>
struct CacheTraits<Type::kI8> {
#if defined(__AVX512F__)
  using KeyDot = ByteDot<false>;
  using ValueDot = ByteDot<true>;
#else
  using KeyDot = FloatDot;
  using ValueDot = FloatDot;
#endif
};

inline bool tiled_type(Type type) { return type == Type::kI8 ? kTiled<Type::kI8> : type == Type::kBF16 && kTiled<Type::kBF16>; }

// head_dim as tiles have it: whole 64-byte lines of cache bytes, padded with zeros.
inline int padded_dim(int head_dim, Type type) {
  int unit = 64 / (int)size_of(type);
  return (head_dim + unit - 1) / unit * unit;
}

struct KvTile {
  uint8_t* keys;
  uint8_t* values;
  float* key_scales;    // int8 cache: [64], of the scores
  float* value_scales;  // int8 cache: [64], and their logarithms to base 2 and inverses
  float* value_logs;
  float* value_inverses;
  uint8_t* copies;      // [2, 64] padded entries, for head sizes that are not whole lines
  uint8_t* blank;       // one padded entry of zeros
};

// Asks for the memory of entries to come, some lines at a time. Into the second-level cache: it takes far more requests
// at a time than the first, and what keeps memory busy is that there are always some under way.
struct Ahead {
  const uint8_t* base;
  const size_t* entries;
  size_t entry_bytes;
  size_t span;  // bytes of an entry's heads
  int token, end;
  const uint8_t* next = nullptr;
  const uint8_t* stop = nullptr;

  int lines() const { return (end - token) * (int)((span + 63) / 64); }
  KLLM_INLINE void ask(int lines) {
    for (; lines > 0; --lines) {
      if (next >= stop && !go_on()) return;
      fetch_l2(next);
      next += 64;
    }
  }
  void ask_all() {
    while (next < stop || go_on())
      for (; next < stop; next += 64) fetch_l2(next);
  }

 private:
  // To the next entry, and those that lie right behind it.
  bool go_on() {
    if (token >= end) return false;
    next = base + entries[token++] * entry_bytes;
    stop = next + span;
    for (; token < end && base + entries[token] * entry_bytes == stop; ++token) stop += span;
    return true;
  }
};

template <Type kType>
struct CacheLines {
  using Dot = typename CacheTraits<kType>::KeyDot;
  static constexpr int kDepth = Dot::kDepth;
  static constexpr size_t kSize = kType == Type::kF32 ? 4 : kType == Type::kBF16 ? 2 : 1;
  // Steps of the product that one 32-bit word of keys makes; if it is one, keys need no conversion.
  static constexpr int kSteps = 4 / (int)kSize / kDepth;

  // Words [4 piece, 4 piece + 4) of 16 keys, a word of each to a line.
  static KLLM_INLINE void transposed(const uint8_t* const* key, int piece, vw (&words)[4]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      words[i] = join4(key[i] + piece * 16, key[4 + i] + piece * 16, key[8 + i] + piece * 16, key[12 + i] + piece * 16);
    }
    transpose4(words[0], words[1], words[2], words[3]);
    if constexpr (kType == Type::kI8 && kSteps == 1) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) words[i] = unsigned_bytes(words[i]);
    }
  }

  // kDepth lines of values: of the entries of kDepth keys from byte `at` on.
  static KLLM_INLINE void interleaved(const uint8_t* const* rows, size_t at, typename Dot::Word* lines) {
#if defined(__AVX512F__)
    if constexpr (kDepth == 4) {
      vw words[4];
      interleave8(wload(rows[0] + at), wload(rows[1] + at), wload(rows[2] + at), wload(rows[3] + at), words);
      for (int i = 0; i < 4; ++i) lines[i] = words[i];
      return;
    } else if constexpr (kDepth == 2) {
      interleave16(wload(rows[0] + at), wload(rows[1] + at), lines[0], lines[1]);
      return;
    }
#endif
    if constexpr (kDepth > 1) {
      return;
    } else if constexpr (kType == Type::kF32) {
      lines[0] = load((const float*)(rows[0] + at));
    } else if constexpr (kType == Type::kBF16) {
      lines[0] = load_bf16((const uint16_t*)(rows[0] + at));
    } else {
      lines[0] = to_float(load_i8((const int8_t*)(rows[0] + at)));
    }
  }
};

// Values straight from the cache, as lines of a product: for a few rows a tile would be written to be read once.
template <Type kType>
struct CachedValues {
  const uint8_t* const* rows;
  Ahead ahead;
  int ask;  // lines a step
  size_t at = 0;

  void skip(int lines) { at += lines * kLanes * CacheLines<kType>::kSize; }
  template <class Dot, int kLines>
  KLLM_INLINE void read(int step, typename Dot::Word (&line)[kLines]) {
    using Cache = CacheLines<kType>;
    if constexpr (kLines % Cache::kDepth == 0) {
#pragma GCC unroll 4
      for (int n = 0; n < kLines; n += Cache::kDepth) {
        Cache::interleaved(rows + step * Cache::kDepth, at + n * kLanes * Cache::kSize, line + n);
      }
    }
    ahead.ask(ask);
  }
};

// Takes the tiles of the keys [first, end) of a row one after the other, each head by head.
template <Type kType>
class TileBuilder {
  using Cache = CacheLines<kType>;
  using Dot = typename Cache::Dot;
  static constexpr size_t kSize = Cache::kSize;

 public:
  TileBuilder(const AttentionTask& task, const KvTile& tile, int head, int heads, int first, int end)
      : task_(task), table_(task.table), tile_(tile), head_(head), heads_(heads), block_(first / task.block_tokens),
        offset_(first % task.block_tokens), left_(end - first), dims_(padded_dim(task.head_dim, kType)),
        bytes_(task.head_dim * kSize) {
    memset(tile.blank, 0, dims_ * kSize);
    for (int i = 0; i < kTilesAhead; ++i) {
      locate(spots_[i]);
      for (const void* cache : {task.k_cache, task.v_cache}) {
        Ahead ahead = ahead_of(cache, spots_[i], 0, spots_[i].count);
        ahead.ask_all();
      }
    }
  }

  // Moves to the next tile.
  void advance() {
    locate(spots_[(++tile_index_ + kTilesAhead) % (kTilesAhead + 1)]);
  }

  // Turns to the index-th head: where its keys and values are, and its share of the memory of a tile to come.
  void select(int index) {
    const Spots& later = spots_[(tile_index_ + kTilesAhead) % (kTilesAhead + 1)];
    const int first = later.count * index / heads_, end = later.count * (index + 1) / heads_;
    keys_ahead = ahead_of(task_.k_cache, later, first, end);
    values_ahead = ahead_of(task_.v_cache, later, first, end);
    if (index > 0 && bytes_ == dims_ * kSize) {
      for (int i = 0; i < spots().count; ++i) keys[i] += bytes_, values[i] += bytes_;
    } else {
      point(task_.k_cache, head_ + index, tile_.copies, keys);
      point(task_.v_cache, head_ + index, tile_.copies + kTileKeys * dims_ * kSize, values);
    }
    if constexpr (kType == Type::kI8) build_scales(head_ + index);
  }

  // Writes the selected head's tile.
  void build() {
    build_keys();
    build_values();
  }

  void build_keys() { write_keys(); }

  void build_values() {
    write_values(values, kTiled<kType> ? kTileKeys : count());
    keys_ahead.ask_all();
    values_ahead.ask_all();
  }

  // Values of the first `seen` keys, zeros for those after: tile instructions take all 64, and 0 times 0 is 0.
  void write_values(int seen) {
    const uint8_t* rows[kTileKeys];
    for (int key = 0; key < kTileKeys; ++key) rows[key] = key < seen ? values[key] : tile_.blank;
    write_values(rows, kTileKeys);
  }

  int count() const { return spots().count; }

  // Of bfloat16.
  bool values_are_finite() const {
#if defined(__AVX512F__)
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int key = 0; key < spots().count; ++key) {
      for (int at = 0; at < dims_ * (int)kSize; at += 64) {
        const __m512i bits = _mm512_and_si512(wload(values[key] + at).v, exponent);
        if (_mm512_cmpeq_epi16_mask(bits, exponent)) return false;
      }
    }
#endif
    return true;
  }

  // Bytes from the selected head's key to that of the next token; holds within 16 tokens, from a multiple of 16 on, if
  // there are such blocks.
  size_t key_stride() const { return task_.kv_heads * bytes_; }
  bool whole_lines() const { return task_.block_tokens % kLanes == 0 && bytes_ == dims_ * kSize; }

  // Of the selected head: padded entries, zeros after the last.
  const uint8_t* keys[kTileKeys];
  const uint8_t* values[kTileKeys];
  Ahead keys_ahead, values_ahead;

 private:
  // Where the tokens of a tile are: cached entries of head 0 before each.
  struct Spots {
    int count = 0;
    size_t entries[kTileKeys];
  };

  void locate(Spots& spots) {
    if (left_ == 0 && !at_next_row_ && task_.next_table) {  // only to ask for memory: these tiles are never taken
      at_next_row_ = true;
      table_ = task_.next_table;
      left_ = task_.next_context;
      block_ = offset_ = 0;
    }
    spots.count = left_ < kTileKeys ? left_ : kTileKeys;
    left_ -= spots.count;
    for (int i = 0; i < spots.count; ++i) {
      spots.entries[i] = ((size_t)table_[block_] * task_.block_tokens + offset_) * task_.kv_heads;
      if (++offset_ == task_.block_tokens) {
        offset_ = 0;
        ++block_;
      }
    }
    if constexpr (kType == Type::kI8) ask_scales(spots);
  }

  // About one request for every 64 bytes of scales.
  void ask_scales(const Spots& spots) const {
    const int step = task_.kv_heads >= 16 ? 1 : task_.kv_heads >= 8 ? 2 : task_.kv_heads >= 3 ? 4 : 8;
    for (int i = 0; i < spots.count; i += step) {
      fetch_l2(task_.k_scales + spots.entries[i] + head_);
      fetch_l2(task_.v_scales + spots.entries[i] + head_);
    }
  }

  const Spots& spots() const { return spots_[tile_index_ % (kTilesAhead + 1)]; }

  Ahead ahead_of(const void* cache, const Spots& spots, int first, int end) const {
    return {(const uint8_t*)cache + head_ * bytes_, spots.entries, bytes_, heads_ * bytes_, first, end};
  }

  void point(const void* cache, int head, uint8_t* copies, const uint8_t** rows) const {
    const int count = spots().count;
    const size_t* entries = spots().entries;
    const size_t padded = dims_ * kSize;
    for (int i = 0; i < count; ++i) rows[i] = (const uint8_t*)cache + (entries[i] + head) * bytes_;
    for (int i = 0; i < count && bytes_ != padded; ++i) {
      uint8_t* copy = copies + i * padded;
      memcpy(copy, rows[i], bytes_);
      memset(copy + bytes_, 0, padded - bytes_);
      rows[i] = copy;
    }
    for (int i = count; i < kTileKeys; ++i) rows[i] = tile_.blank;
  }

  void write_keys() const {
    const int pieces = (int)(dims_ * kSize / 16);
    for (int line = 0; line * kLanes < spots().count; ++line) {
      for (int piece = 0; piece < pieces; ++piece) {
        vw words[4];
        Cache::transposed(keys + line * kLanes, piece, words);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) put_keys(words[i], piece * 4 + i, line);
      }
    }
  }

  // One 32-bit word of each of 16 keys.
  KLLM_INLINE void put_keys(vw word, int index, int line) const {
    uint8_t* out = tile_.keys + ((size_t)index * Cache::kSteps * kKeyLines + line) * 64;
    constexpr size_t kStride = kKeyLines * 64;
    if constexpr (kType == Type::kI8 && kTiled<kType>) {
      wstore(out, unsigned_bytes(word));  // and back: tile instructions take signed ones
    } else if constexpr (Cache::kSteps == 1) {
      wstore(out, word);
    } else if constexpr (Cache::kSteps == 2) {
      store((float*)out, even_bf16(word));
      store((float*)(out + kStride), odd_bf16(word));
    } else {
      store((float*)out, signed_byte<0>(word));
      store((float*)(out + kStride), signed_byte<1>(word));
      store((float*)(out + 2 * kStride), signed_byte<2>(word));
      store((float*)(out + 3 * kStride), signed_byte<3>(word));
    }
  }

  void write_values(const uint8_t* const* rows, int count) {
    constexpr int kDepth = Dot::kDepth;
    typename Dot::Word* out = (typename Dot::Word*)tile_.values;
    for (int key = 0; key < count; key += kDepth) {
      for (int dim = 0; dim < dims_; dim += kLanes * kDepth, out += kDepth) {
        Cache::interleaved(rows + key, dim * kSize, out);
        if constexpr (kTiled<kType>) keys_ahead.ask(2), values_ahead.ask(2);
      }
    }
  }

  void build_scales(int head) const {
    const int count = spots().count;
    const size_t* entries = spots().entries;
    for (int i = 0; i < count; ++i) {
      tile_.key_scales[i] = task_.k_scales[entries[i] + head];
      tile_.value_scales[i] = task_.v_scales[entries[i] + head];
    }
    for (int i = count; i < kTileKeys; ++i) tile_.key_scales[i] = tile_.value_scales[i] = 0.0f;
#if defined(__AVX512F__)
    for (int i = 0; i < kTileKeys; i += kLanes) {
      // A value of zeros has no scale, and counts. One that is not finite spoils the rows that see it by its logarithm,
      // and by its inverse none of those that do not.
      const vf scale = max(set1(1e-30f), load(tile_.value_scales + i));
      store(tile_.value_logs + i, log2(scale));
      store(tile_.value_inverses + i, inverse(min(scale, set1(1e30f))));
    }
#endif
  }

  const AttentionTask& task_;
  const int64_t* table_;
  bool at_next_row_ = false;
  const KvTile tile_;
  const int head_, heads_;
  int block_, offset_;  // of the first token not located
  int left_;            // keys not located
  int tile_index_ = -1;
  const int dims_;
  const size_t bytes_;
  Spots spots_[kTilesAhead + 1];  // of this tile and those after
};

}  // namespace kllm::KLLM_ISA
