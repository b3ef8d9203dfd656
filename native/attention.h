// Attention of cached tokens, flash style: scores of one tile of keys at a time, for prefill and decode alike.
//
// A row is one query head of one token. Every row goes through the same tiles (64 keys at fixed places of the context)
// in the same order with the same operations, alone or among others, so its result is the same bits in every batch
// and chunk. The context is cut into parts of kPartKeys keys, summed up apart and merged in order, which lets a long
// context be shared out among threads without changing a bit.
#pragma once

#include "attention_rows.h"

#if defined(KLLM_TILES)
#include "attention_tiles.h"
#endif

namespace kllm::KLLM_ISA {

static_assert(kPartKeys % kTileKeys == 0);

// Adds the sums of row b of `from` to row a of `into`.
inline void merge_row(const Sums& into, int a, const Sums& from, int b, int dims) {
  const float after = into.maximum[a] > from.maximum[b] ? into.maximum[a] : from.maximum[b];
  const vf old = set1(rescaling(into.maximum[a], after)), fresh = set1(rescaling(from.maximum[b], after));
  auto merge = [&](float* x, const float* y, int count) {
    for (int i = 0; i < count; i += kLanes) store(x + i, fma(load(y + i), fresh, load(x + i) * old));
  };
  merge(into.weighted + (size_t)a * dims, from.weighted + (size_t)b * dims, dims);
  merge(into.total + a * kLanes, from.total + b * kLanes, kLanes);
  into.maximum[a] = after;
}

inline void clear_rows(const Sums& sums, int first, int end, int dims) {
  if (first >= end) return;
  memset(sums.weighted + (size_t)first * dims, 0, (size_t)(end - first) * dims * sizeof(float));
  memset(sums.total + first * kLanes, 0, (end - first) * kLanes * sizeof(float));
  for (int row = first; row < end; ++row) sums.maximum[row] = kNone;
}

// out [head_dim] from the sums of a row.
template <Type kType>
inline void finish_row(const Sums& sums, int row, int dims, float* out, int head_dim) {
  const vf total = set1(sum(load(sums.total + row * kLanes)));
  const float* weighted = sums.weighted + (size_t)row * dims;
  alignas(64) float lanes[kLanes];
  for (int i = 0; i < dims; i += kLanes) {
    store(lanes, load(weighted + i) / total);
    for (int lane = 0; lane < kLanes; lane += 4) {
      const int dim = dim_of_lane<kType>(i, lane), left = head_dim - dim;
      if (left > 0) memcpy(out + dim, lanes + lane, (left < 4 ? left : 4) * sizeof(float));
    }
  }
}

// Where the sums of one head and part of the context are in the caller's memory: [parts][kv_heads][group] rows.
inline Sums part_sums(const AttentionTask& task, int part, int head) {
  const int group = task.heads / task.kv_heads, dims = padded_dim(task.head_dim, task.cache_type);
  float* base = task.partial + ((size_t)part * task.heads + (size_t)head * group) * part_floats(task.head_dim);
  return {base, base + (size_t)group * dims, base + (size_t)group * (dims + kLanes)};
}

inline float* out_of(const AttentionTask& task, int query, int head) {
  return task.out + (size_t)(task.token + query) * task.out_stride + (size_t)head * task.head_dim;
}

// A pass: as many queries and KV heads as the workspace holds. Rows are ordered by KV head, query, head of the group.
template <Type kType, bool kExact>
class Attention {
 public:
  explicit Attention(const AttentionTask& task)
      : task_(task), group_(task.heads / task.kv_heads), dims_(padded_dim(task.head_dim, kType)),
        work_(task.scratch, group_, task.head_dim, kType) {}

  void run() {
    const int heads = task_.more_heads + 1, together = heads < work_.capacity ? heads : work_.capacity;
    const int queries = work_.capacity / together;
    for (int head = 0; head < heads; head += together) {
      for (int query = 0; query < task_.queries; query += queries) {
        pass(task_.head + head, heads - head < together ? heads - head : together, query,
             task_.queries - query < queries ? task_.queries - query : queries);
      }
    }
  }

 private:
  void pass(int head, int heads, int query, int queries) {
    head_ = head;
    heads_ = heads;
    rows_ = queries * group_;
    context_ = task_.context + query;
    const int context = context_ + queries - 1;
    if (task_.partial) {
      const int start = task_.part * kPartKeys, end = start + kPartKeys;
      for (int i = 0; i < heads; ++i) sums_[i] = part_sums(task_, task_.part, head + i);
      TileBuilder<kType> builder(task_, work_.tile, head, heads, start, context < end ? context : end);
      load_queries(query);
      return attend(builder, start, context < end ? context : end);
    }
    TileBuilder<kType> builder(task_, work_.tile, head, heads, 0, context);
    load_queries(query);
    for (int i = 0; i < heads; ++i) sums_[i] = work_.whole.from(i * rows_, dims_);
    attend(builder, 0, context < kPartKeys ? context : kPartKeys);  // nothing came before it
    for (int i = 0; i < heads; ++i) sums_[i] = work_.part.from(i * rows_, dims_);
    for (int start = kPartKeys; start < context; start += kPartKeys) {
      attend(builder, start, context < start + kPartKeys ? context : start + kPartKeys);
      for (int i = 0; i < heads; ++i) {
        for (int row = i * rows_ + first_row(start); row < (i + 1) * rows_; ++row) {
          merge_row(work_.whole, row, work_.part, row, dims_);
        }
      }
    }
    for (int row = 0; row < heads * rows_; ++row) {
      float* out = out_of(task_, query + row % rows_ / group_, query_head(row));
      finish_row<kType>(work_.whole, row, dims_, out, task_.head_dim);
    }
  }

  int query_head(int row) const { return (head_ + row / rows_) * group_ + row % group_; }

  void load_queries(int first) {
    for (int row = 0; row < heads_ * rows_; ++row) {
      const int query = row % rows_ / group_;
      work_.limits[row] = context_ + query;
      const float* q = task_.q + (size_t)(task_.token + first + query) * task_.q_stride +
                       (size_t)query_head(row) * task_.head_dim;
      put_query<kType, kExact>(work_, row, q, task_.head_dim, dims_, task_.scale);
    }
    put_columns();
  }

  // The first row of a head that sees the key at `position`.
  int first_row(int position) const { return position < context_ ? 0 : (position - context_ + 1) * group_; }

  // Sums over the keys [start, end), start a multiple of the tile.
  void attend(TileBuilder<kType>& builder, int start, int end) {
    for (int i = 0; i < heads_; ++i) clear_rows(sums_[i], first_row(start), rows_, dims_);
    for (; start < end; start += kTileKeys) {
      builder.advance();
      for (int i = 0; i < heads_; ++i) {
        builder.select(i);
        const RowsOfTile<kType, kExact> rows{work_, dims_, start, i * rows_, sums_[i], builder};
        attend_rows(rows, i, first_row(start));
      }
    }
  }

#if defined(KLLM_TILES)
  using Rows = RowsOfTile<kType, kExact>;

  void attend_rows(const Rows& rows, int head, int first) const {
    if constexpr (!kTiled<kType>) return rows.attend(first, rows_);
    else if (kType == Type::kI8 && rows_ <= Rows::kBlock) return rows.attend(first, rows_);  // the same bits, sooner
    else TiledRows<kType, kExact>{rows}.attend(first, rows_, few() ? columns_of(work_, head, dims_) : nullptr);
  }
  // Whether keys are taken as they lie in the cache.
  bool few() const { return kType == Type::kBF16 && rows_ <= kColumns && heads_ <= TiledWorkspace::kHeads; }
  void put_columns() const {
    for (int head = 0; head < heads_ && few(); ++head)
      transpose_query(work_.q + (size_t)head * rows_ * dims_ * 2, rows_, dims_ / 2, columns_of(work_, head, dims_));
  }
#else
  void attend_rows(const RowsOfTile<kType, kExact>& rows, int, int first) const { rows.attend(first, rows_); }
  void put_columns() const {}
#endif

  const AttentionTask& task_;
  const int group_, dims_;
  const Workspace work_;
  Sums sums_[kPassRows];  // of each KV head of the pass
  int head_ = 0, heads_ = 0;
  int rows_ = 0;          // of one KV head in the pass
  int context_ = 0;       // of its first query
};

inline size_t attention_scratch(int group, int head_dim, Type cache_type) {
  return Workspace(nullptr, group, head_dim, cache_type).bytes;
}

inline void attention(const AttentionTask& task) {
#if defined(KLLM_TILES)
  const TilesInUse tiles(attention_tiles());
#endif
  switch (task.cache_type) {
    case Type::kF32: return Attention<Type::kF32, true>(task).run();
    case Type::kBF16: return Attention<Type::kBF16, true>(task).run();
    case Type::kI8: return task.exact ? Attention<Type::kI8, true>(task).run() : Attention<Type::kI8, false>(task).run();
    case Type::kI16: return;
  }
}

template <Type kType>
inline void merge_parts_of(const AttentionTask& task) {
  const int group = task.heads / task.kv_heads, dims = padded_dim(task.head_dim, kType);
  const Sums whole = Workspace(task.scratch, group, task.head_dim, kType).whole;
  for (int head = task.head; head <= task.head + task.more_heads; ++head) {
    clear_rows(whole, 0, group, dims);
    for (int part = 0; part * kPartKeys < task.context; ++part) {
      const Sums sums = part_sums(task, part, head);
      for (int row = 0; row < group; ++row) merge_row(whole, row, sums, row, dims);
    }
    for (int row = 0; row < group; ++row) {
      finish_row<kType>(whole, row, dims, out_of(task, 0, head * group + row), task.head_dim);
    }
  }
}

// Brings the parts of a single query's context together, in order.
inline void merge_parts(const AttentionTask& task) {
  switch (task.cache_type) {
    case Type::kF32: return merge_parts_of<Type::kF32>(task);
    case Type::kBF16: return merge_parts_of<Type::kBF16>(task);
    case Type::kI8: return merge_parts_of<Type::kI8>(task);
    case Type::kI16: return;
  }
}

}  // namespace kllm::KLLM_ISA
