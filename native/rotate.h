// Rotary positions of q and k, an optional norm of their heads before, and the step's entries of the KV cache.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace kllm::KLLM_ISA {

KLLM_INLINE vf load_up_to(const float* p, int n) { return n >= kLanes ? load(p) : load_n(p, n); }
KLLM_INLINE void store_up_to(float* p, vf x, int n) { n >= kLanes ? store(p, x) : store_n(p, x, n); }

// x [head_dim] / sqrt(mean(x^2) + eps) * weight, in place.
inline void norm_head(float* x, const float* weight, float eps, int head_dim) {
  vf squares = zero();
  for (int i = 0; i < head_dim; i += kLanes) {
    vf v = load_up_to(x + i, head_dim - i);
    squares = fma(v, v, squares);
  }
  const vf factor = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)head_dim + eps));
  for (int i = 0; i < head_dim; i += kLanes) {
    const int left = head_dim - i;
    store_up_to(x + i, load_up_to(x + i, left) * factor * load_up_to(weight + i, left), left);
  }
}

// Pairs (i, i + head_dim / 2) turned in place; the sign is in sin.
inline void rotate_head(float* x, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const int left = half - i;
    vf a = load_up_to(x + i, left), b = load_up_to(x + half + i, left);
    vf low = fma(b, load_up_to(sin + i, left), a * load_up_to(cos + i, left));
    vf high = fma(a, load_up_to(sin + half + i, left), b * load_up_to(cos + half + i, left));
    store_up_to(x + i, low, left);
    store_up_to(x + half + i, high, left);
  }
}

inline void put_bf16(uint16_t* entry, const float* x, int head_dim) {
  int i = 0;
  for (; i + kLanes <= head_dim; i += kLanes) store_bf16(entry + i, load(x + i));
  for (; i < head_dim; ++i) entry[i] = float_to_bf16(x[i]);
}

// Returns the scale: max |x| / 127, 0 for zeros.
inline float put_i8(int8_t* entry, const float* x, int head_dim) {
  vf peak = zero();
  for (int i = 0; i < head_dim; i += kLanes) peak = max(peak, abs(load_up_to(x + i, head_dim - i)));
  const float scale = top(peak) / 127.0f;
  const vf inverse = set1(scale > 0 ? 1.0f / scale : 0.0f);
  for (int i = 0; i < head_dim; i += kLanes) {
    vi q = to_int(min(max(load_up_to(x + i, head_dim - i) * inverse, set1(-127.0f)), set1(127.0f)));
    if (head_dim - i >= kLanes) {
      store_i8(entry + i, q);
    } else {
      alignas(16) int8_t bytes[kLanes];
      store_i8(bytes, q);
      memcpy(entry + i, bytes, head_dim - i);
    }
  }
  return scale;
}

// One head of one token to its place, counted in entries of one head.
inline void put_entry(void* cache, float* scales, Type type, size_t index, const float* x, int head_dim) {
  const size_t at = index * head_dim;
  switch (type) {
    case Type::kF32: memcpy((float*)cache + at, x, head_dim * sizeof(float)); break;
    case Type::kBF16: put_bf16((uint16_t*)cache + at, x, head_dim); break;
    case Type::kI8: scales[index] = put_i8((int8_t*)cache + at, x, head_dim); break;
    case Type::kI16: break;  // no cache has it
  }
}

inline void rotate(const RotateTask& task) {
  const int dim = task.head_dim;
  for (int row = task.row; row < task.row_end; ++row) {
    float* q = task.qkv + (size_t)row * task.stride;
    float* k = q + (size_t)task.heads * dim;
    const float* v = k + (size_t)task.kv_heads * dim;
    const float* cos = task.cos + (size_t)task.positions[row] * dim;
    const float* sin = task.sin + (size_t)task.positions[row] * dim;
    for (int head = 0; head < task.heads + task.kv_heads; ++head) {
      const float* norm = head < task.heads ? task.q_norm : task.k_norm;
      float* x = q + (size_t)head * dim;
      if (norm) norm_head(x, norm, task.eps, dim);
      rotate_head(x, cos, sin, dim);
    }
    for (int head = 0; head < task.kv_heads; ++head) {
      const size_t index = (size_t)task.slots[row] * task.kv_heads + head;
      put_entry(task.k_cache, task.k_scales, task.cache_type, index, k + (size_t)head * dim, dim);
      put_entry(task.v_cache, task.v_scales, task.cache_type, index, v + (size_t)head * dim, dim);
    }
  }
}

}  // namespace kllm::KLLM_ISA
