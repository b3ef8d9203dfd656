#include "attention_plan.h"

#include <algorithm>

#include "machine.h"

namespace kllm {

void AttentionPlan::all_tokens(const Span* spans, int rows, int kv_heads) {
  queries_.clear();
  splits_.clear();
  const bool share_out = rows < 2 * pool().threads();
  const int chunk = kernels().query_chunk;
  for (int row = 0; row < rows; ++row) {
    const Span& span = spans[row];
    if (span.count == 1) {
      add_single(row, (int)span.start, (int)span.context, kv_heads, share_out);
      continue;
    }
    for (int first = 0; first < span.count; first += chunk) {
      const int count = std::min(chunk, (int)span.count - first);
      const int context = (int)(span.context - span.count) + first + 1;
      for (int head = 0; head < kv_heads; ++head)
        queries_.push_back({row, (int)span.start + first, count, context, head, 0, kWhole, 0});
    }
  }
  longest_first();
}

void AttentionPlan::single_tokens(const Span* spans, int rows, int kv_heads, const int64_t* tokens, int count) {
  queries_.clear();
  splits_.clear();
  const bool share_out = count < 2 * pool().threads();
  for (int row = 0, next = 0; row < rows; ++row) {
    const Span& span = spans[row];
    for (; next < count && tokens[next] < span.start + span.count; ++next) {
      const int64_t context = span.context - span.count + tokens[next] - span.start + 1;
      add_single(row, (int)tokens[next], (int)context, kv_heads, share_out);
    }
  }
  longest_first();
}

// All heads go into one task: keys and values are then read in the order they lie in. Where there are too few rows for
// the threads, a long context is shared out in parts.
void AttentionPlan::add_single(int row, int token, int context, int kv_heads, bool share_out) {
  if (!share_out || context <= kPartKeys) {
    queries_.push_back({row, token, 1, context, 0, kv_heads - 1, kWhole, 0});
    return;
  }
  for (int part = 0; part * kPartKeys < context; ++part)
    queries_.push_back({row, token, 1, context, 0, kv_heads - 1, part, (int)splits_.size()});
  splits_.push_back({row, token, context});
}

// So that no thread begins a long task when the others are done: sorted, and dealt out to the threads' parts, to and fro.
void AttentionPlan::longest_first() {
  auto work = [](const Query& query) {
    const int keys = query.part == kWhole ? query.context + query.queries / 2
                                          : std::min(kPartKeys, query.context - query.part * kPartKeys);
    return (int64_t)query.queries * (query.more_heads + 1) * keys;
  };
  std::vector<Query> sorted = queries_;
  std::stable_sort(sorted.begin(), sorted.end(), [&](const Query& a, const Query& b) { return work(a) > work(b); });
  const int threads = pool().threads(), tasks = (int)sorted.size();
  auto begin_of = [&](int thread) { return Pool::begin_of(thread, threads, tasks); };
  for (int next = 0, round = 0; next < tasks; ++round)
    for (int turn = 0; turn < threads; ++turn) {
      const int thread = round % 2 ? threads - 1 - turn : turn, place = begin_of(thread) + round;
      if (place < begin_of(thread + 1)) queries_[place] = sorted[next++];
    }
}

bool AttentionPlan::is_whole_row(const Query& query) { return query.queries == 1 && query.part == kWhole; }

AttentionTask AttentionPlan::task_for(const AttentionTask& all, const Query& query, const int64_t* tables,
                                      int table_width) const {
  AttentionTask task = all;
  task.table = tables + (size_t)query.row * table_width;
  task.head = query.head;
  task.more_heads = query.more_heads;
  task.token = query.token;
  task.queries = query.queries;
  task.context = query.context;
  task.part = query.part;
  return task;
}

void AttentionPlan::run(const AttentionTask& all, const int64_t* tables, int table_width, const Scratch& scratch) {
  // Parts of every split row lie one after the other; all rows get the room of the longest.
  size_t split_floats = 0;
  for (const Split& split : splits_) {
    const size_t parts = (split.context + kPartKeys - 1) / kPartKeys;
    split_floats = std::max(split_floats, parts * all.heads * part_floats(all.head_dim));
  }
  float* partial = partial_.of<float>(split_floats * splits_.size());
  pool().run((int)queries_.size(), [&](int index, int thread) {
    const Query& query = queries_[index];
    AttentionTask task = task_for(all, query, tables, table_width);
    task.partial = query.part == kWhole ? nullptr : partial + split_floats * query.split;
    const int next = index + 1;
    if (is_whole_row(query) && next < (int)queries_.size() && is_whole_row(queries_[next])) {
      task.next_table = tables + (size_t)queries_[next].row * table_width;
      task.next_context = queries_[next].context;
    }
    task.scratch = scratch.slice(thread);
    task.scratch_bytes = scratch.bytes();
    kernels().attention(task);
  });
  for (size_t i = 0; i < splits_.size(); ++i) {
    const Split& split = splits_[i];
    const Query whole{split.row, split.token, 1, split.context, 0, all.kv_heads - 1, 0, (int)i};
    AttentionTask task = task_for(all, whole, tables, table_width);
    task.partial = partial + split_floats * i;
    task.scratch = scratch.slice(0);
    task.scratch_bytes = scratch.bytes();
    kernels().merge_parts(task);
  }
}

}  // namespace kllm
