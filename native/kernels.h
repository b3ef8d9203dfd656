// What is compiled once per instruction set: a table of functions, each doing one task of a parallel region.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"

namespace kllm {

// kI16: numbers of activations as two bytes, see below.
enum class Type { kF32, kBF16, kI8, kI16 };

inline size_t size_of(Type type) { return type == Type::kF32 ? 4 : type == Type::kI8 ? 1 : 2; }

// Activations [rows, cols] as a product wants them; the columns up to `stride` are zero.
// I8: groups of 32 columns, value = q * scale; sums: sum of q of a group, which is what the offsets of unsigned
// weights and the minimum of Q4_1 are corrected with.
// I16: value = (high + low / 254) * scale, one scale a row; a row is its high bytes and then its low ones, both signed.
struct Activations {
  Type type;
  int rows, cols;
  int stride;       // elements from row to row, a multiple of 32
  void* data;
  float* scales;    // I8: [rows, stride / 32]; I16: [rows]
  int32_t* sums;    // I8: [rows, stride / 32]; I16: [rows, 2]

  const uint8_t* row(int index) const { return (const uint8_t*)data + (size_t)index * stride * size_of(type); }
};

// Where results go. y: [rows, matrix rows], `stride` elements from row to row.
enum class Store {
  kSet,     // y = product + bias
  kAdd,     // y += product + bias, the residual stream
  kGated,   // y = silu(gate) * up, [rows, matrix rows / 2]
};

struct Sink {
  Store store;
  Type type;           // of y: kF32 or kBF16 (kSet and kGated)
  void* y;
  size_t stride;
  const float* bias;   // [matrix rows] or null
};

// Rows [row, row_end) times panels [panel, panel_end); of a gated matrix, whole pairs of panels.
struct GemmTask {
  const Matrix* matrix;
  const Activations* x;
  const Sink* sink;
  int row, row_end;
  int panel, panel_end;
  void* scratch;       // kScratchBytes per thread, 64-byte aligned, for panels that are dequantised on the way
  size_t scratch_bytes;
};

// The context of a row is summed up in parts of this many keys, merged in order, whoever does it.
constexpr int kPartKeys = 256;

// Floats of the sums of one query head over one part, of any cache type.
inline size_t part_floats(int head_dim) { return (size_t)(head_dim + 63) / 64 * 64 + 32; }

// Attention of `queries` consecutive tokens of one row to its cached tokens, for one KV head or several.
// Caches are [blocks, block_tokens, kv_heads, head_dim] and are read in place through the block table.
// Each token's query heads [head * group, (head + 1) * group) share the KV head.
struct AttentionTask {
  const float* q;            // [tokens, heads, head_dim] of the step, rotated and not scaled
  size_t q_stride;           // floats from token to token
  float* out;                // the same layout, out_stride
  size_t out_stride;
  const void* k_cache;
  const void* v_cache;
  const float* k_scales;     // int8 cache: [blocks, block_tokens, kv_heads], else null
  const float* v_scales;
  Type cache_type;           // kF32, kBF16 or kI8
  const int64_t* table;      // block table of the row
  int block_tokens, heads, kv_heads, head_dim;
  float scale;               // of the scores
  int head;                  // KV head
  int more_heads;            // KV heads after it that the task takes along: all of them in decode, since memory is
                             // then read in order; none in prefill
  int token;                 // first token of the task, in the step
  int queries;
  int context;               // cached tokens that the first query sees, its own included; the next sees one more
  void* scratch;
  size_t scratch_bytes;
  // For a single query whose context is shared out among threads: null, or [parts][heads][part_floats], where
  // attention() leaves the sums of part `part` and from which merge_parts() makes `out`. The bits are the same.
  float* partial;
  int part;
  // The row that this thread is likely to take next, or null: the memory of its first keys is asked for in time.
  const int64_t* next_table;
  int next_context;
  bool exact;                // int8 cache: q and probabilities count as two bytes, else as one
};

// Rows [row, row_end) of q and k turned by their positions, k and v written to the cache.
struct RotateTask {
  float* qkv;                // [tokens, (heads + 2 kv_heads) * head_dim]: q is turned in place
  size_t stride;
  const float* cos;          // [positions, head_dim], sign of sin included: x cos + swapped(x) sin
  const float* sin;
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens]
  const float* q_norm;       // [head_dim] or null: norm of every head before it is turned
  const float* k_norm;
  float eps;
  void* k_cache;
  void* v_cache;
  float* k_scales;
  float* v_scales;
  Type cache_type;
  int heads, kv_heads, head_dim;
  int row, row_end;
};

struct Kernels {
  const char* name;
  // Rows [row, row_end) of float x to activations, through an RMS norm if there is a weight.
  void (*prepare)(const float* x, size_t stride, const float* norm, float eps, const Activations& out, int row, int row_end);
  void (*gemm)(const GemmTask&);
  void (*rotate)(const RotateTask&);
  void (*attention)(const AttentionTask&);
  void (*merge_parts)(const AttentionTask&);
  // Scratch bytes an attention task of these sizes needs at most.
  size_t (*attention_scratch)(int group, int head_dim, Type cache_type);
  // Whether products with this matrix take I16 instead of I8. Null: with none.
  bool (*takes_i16)(const Matrix&);
  // Rows of activations that a task takes of many: they stay in the second-level cache beside the weights.
  int row_chunk = 120;
  int row_unit = 1;  // of how many rows a task takes
  int query_chunk = 64;  // queries of a row that a task of attention takes
};

extern const Kernels kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels, kAmxKernels;  // kAmxKernels: if KLLM_HAS_AMX

}  // namespace kllm
