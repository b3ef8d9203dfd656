// How the attention of a step is cut for the threads.
#pragma once

#include <vector>

#include "kernels.h"
#include "product.h"

namespace kllm {

// Tokens [start, start + count) of a step are the last of `context` tokens of their row.
struct Span { int64_t start, count, context; };

// Made once per step, used by every layer.
class AttentionPlan {
 public:
  // Every token of every row.
  void all_tokens(const Span* spans, int rows, int kv_heads);
  // Only these tokens, ascending.
  void single_tokens(const Span* spans, int rows, int kv_heads, const int64_t* tokens, int count);

  // `all` has everything but table, head, token, queries, context, scratch and partial.
  void run(const AttentionTask& all, const int64_t* tables, int table_width, const Scratch& scratch);

 private:
  static constexpr int kWhole = -1;
  struct Query {
    int row, token, queries, context, head, more_heads;
    int part;         // of the context, or kWhole
    int split;        // index into splits_, where there are parts
  };
  struct Split { int row, token, context; };

  void add_single(int row, int token, int context, int kv_heads, bool share_out);
  void longest_first();
  static bool is_whole_row(const Query& query);
  AttentionTask task_for(const AttentionTask& all, const Query& query, const int64_t* tables, int table_width) const;

  std::vector<Query> queries_;
  std::vector<Split> splits_;
  Buffer partial_;
};

}  // namespace kllm
