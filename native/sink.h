// Writing the results of a product: bias, residual, gate.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace kllm::KLLM_ISA {

KLLM_INLINE vf with_bias(const Sink& sink, int first, int count, vf value) {
  return sink.bias ? value + load_n(sink.bias + first, count) : value;
}

KLLM_INLINE void write(const Sink& sink, int row, int first, int count, vf value) {
  if (sink.type == Type::kBF16) {
    uint16_t* y = (uint16_t*)sink.y + row * sink.stride + first;
    if (count == kLanes) return store_bf16(y, value);
    alignas(32) uint16_t t[kLanes];
    store_bf16(t, value);
    memcpy(y, t, count * sizeof(uint16_t));
  } else {
    float* y = (float*)sink.y + row * sink.stride + first;
    count == kLanes ? store(y, value) : store_n(y, value, count);
  }
}

// values[nb]: 16 results of `row` each, of panels [panel, panel + NB). Of a gated matrix, panel is even.
template <int NB>
KLLM_INLINE void sink_row(const Sink& sink, const Matrix& matrix, int row, int panel, const vf* values) {
  if (sink.store == Store::kGated) {
    for (int nb = 0; nb + 1 < NB; nb += 2) {
      const int first = (panel + nb) / 2 * kPanelRows, count = matrix.row_count(panel + nb);
      const vf gate = with_bias(sink, first, count, values[nb]);
      const vf up = with_bias(sink, matrix.rows / 2 + first, count, values[nb + 1]);
      write(sink, row, first, count, silu(gate) * up);
    }
    return;
  }
  for (int nb = 0; nb < NB; ++nb) {
    const int first = matrix.first_row(panel + nb), count = matrix.row_count(panel + nb);
    vf value = with_bias(sink, first, count, values[nb]);
    if (sink.store == Store::kAdd) {
      const float* y = (const float*)sink.y + row * sink.stride + first;
      value = value + (count == kLanes ? load(y) : load_n(y, count));
    }
    write(sink, row, first, count, value);
  }
}

// Where the results of whole panels from `panel` on go in `row`.
KLLM_INLINE uint8_t* place(const Sink& sink, int row, int panel) {
  const int first = (sink.store == Store::kGated ? panel / 2 : panel) * kPanelRows;
  return (uint8_t*)sink.y + (row * sink.stride + first) * size_of(sink.type);
}

// Asks for the memory that sink_tile of these rows and panels is going to write. A function of its own: within a tile's it
// takes registers that the products need.
template <int NB>
KLLM_APART void fetch_tile(const Sink& sink, int row, int rows, int panel) {
  const int panels = sink.store == Store::kGated ? NB / 2 : NB, bytes = panels * kPanelRows * (int)size_of(sink.type);
  const size_t stride = sink.stride * size_of(sink.type);
  const uint8_t* y = place(sink, row, panel);
  for (int m = 0; m < rows; ++m, y += stride)
    for (int at = 0; at < bytes; at += 64) fetch_to_write(y + at);
}

template <int NB>
KLLM_APART void sink_rows(const Sink& sink, const Matrix& matrix, int row, int rows, int panel, const vf* values) {
  for (int m = 0; m < rows; ++m) sink_row<NB>(sink, matrix, row + m, panel, values + m * NB);
}

// Results of more passes than this are not expected in the second-level cache. A write that has to wait for its line holds
// up those after it: with them asked for, products of 512 rows of int8 were a twentieth faster on Zen 4.
constexpr int kCachedPasses = 8;

// What is done with the results of whole panels without a bias; kOther: what these do not cover, asked row by row.
enum class Leave { kSet, kAdd, kGated, kGatedBf16, kOther };

KLLM_INLINE Leave leave_of(const Sink& sink, const Matrix& matrix) {
  const bool gated = sink.store == Store::kGated;
  // The panels of a gated matrix lie in turns: where its rows are wanted as they are, they go to two places.
  if (sink.bias || gated != matrix.gated) return Leave::kOther;
  if (sink.type == Type::kBF16) return gated ? Leave::kGatedBf16 : Leave::kOther;
  return gated ? Leave::kGated : sink.store == Store::kAdd ? Leave::kAdd : Leave::kSet;
}

// The results of NB panels in a row, to y, where those of the first belong.
template <Leave kLeave, int NB>
KLLM_INLINE void write_row(uint8_t* y, const vf (&values)[NB]) {
#pragma GCC unroll 8
  for (int n = 0; n < NB; ++n) {
    if constexpr (kLeave == Leave::kGatedBf16) {
      if (n % 2 == 1) store_bf16((uint16_t*)y + n / 2 * kLanes, silu(values[n - 1]) * values[n]);
    } else if constexpr (kLeave == Leave::kGated) {
      if (n % 2 == 1) store((float*)y + n / 2 * kLanes, silu(values[n - 1]) * values[n]);
    } else {
      float* const to = (float*)y + n * kLanes;
      store(to, kLeave == Leave::kAdd ? values[n] + load(to) : values[n]);
    }
  }
}

template <Leave kLeave, int MR, int NB>
KLLM_INLINE void write_rows(uint8_t* y, size_t step, const vf (&values)[MR][NB]) {
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) write_row<kLeave, NB>(y + m * step, values[m]);
}

// sink_row for the rows of a tile. Asked row by row what is to be done with them, a tile of 576 columns took 4 % longer, so
// the usual cases are decided once, and values stay in registers.
template <int MR, int NB>
KLLM_INLINE void sink_tile(const Sink& sink, const Matrix& matrix, int row, int panel, const vf (&values)[MR][NB]) {
  const bool whole = matrix.row_count(panel + NB - 1) == kPanelRows;
  const size_t step = sink.stride * size_of(sink.type);
  uint8_t* const y = place(sink, row, panel);
  switch (whole ? leave_of(sink, matrix) : Leave::kOther) {
    case Leave::kSet: return write_rows<Leave::kSet>(y, step, values);
    case Leave::kAdd: return write_rows<Leave::kAdd>(y, step, values);
    case Leave::kGated: return write_rows<Leave::kGated>(y, step, values);
    case Leave::kGatedBf16: return write_rows<Leave::kGatedBf16>(y, step, values);
    case Leave::kOther: return sink_rows<NB>(sink, matrix, row, MR, panel, values[0]);
  }
}

}  // namespace kllm::KLLM_ISA
