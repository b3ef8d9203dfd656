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
template <class T>
T* place(const Sink& sink, int row, int panel) {
  const int first = (sink.store == Store::kGated ? panel / 2 : panel) * kPanelRows;
  return (T*)sink.y + row * sink.stride + first;
}

// Asks for the memory that sink_tile of these rows and panels is going to write. A function of its own: within a tile's it
// takes registers that the products need.
template <int NB>
KLLM_APART void fetch_tile(const Sink& sink, int row, int rows, int panel) {
  const int panels = sink.store == Store::kGated ? NB / 2 : NB, bytes = panels * kPanelRows * (int)size_of(sink.type);
  const size_t stride = sink.stride * size_of(sink.type);
  const bool floats = sink.type == Type::kF32;
  const auto* y = (const uint8_t*)(floats ? (void*)place<float>(sink, row, panel) : place<uint16_t>(sink, row, panel));
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

// sink_row for the rows of a tile. Asked row by row what is to be done with them, a tile of 576 columns took 4 % longer, so
// the usual cases (whole panels, no bias; floats, or gated bfloat16) are decided once, and values stay in registers.
template <int MR, int NB>
KLLM_INLINE void sink_tile(const Sink& sink, const Matrix& matrix, int row, int panel, const vf (&values)[MR][NB]) {
  const bool gated = sink.store == Store::kGated;
  const bool usual = sink.type == Type::kF32 || (sink.type == Type::kBF16 && gated);
  // The panels of a gated matrix lie in turns: where its rows are wanted as they are, they go to two places.
  if (!usual || sink.bias || gated != matrix.gated || matrix.row_count(panel + NB - 1) != kPanelRows)
    return sink_rows<NB>(sink, matrix, row, MR, panel, values[0]);
  if (sink.type == Type::kBF16) {
    uint16_t* y = place<uint16_t>(sink, row, panel);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m, y += sink.stride)
#pragma GCC unroll 8
      for (int n = 0; n + 1 < NB; n += 2) store_bf16(y + n / 2 * kLanes, silu(values[m][n]) * values[m][n + 1]);
    return;
  }
  float* y = place<float>(sink, row, panel);
  switch (sink.store) {
    case Store::kGated:
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m, y += sink.stride)
#pragma GCC unroll 8
        for (int n = 0; n + 1 < NB; n += 2) store(y + n / 2 * kLanes, silu(values[m][n]) * values[m][n + 1]);
      return;
    case Store::kAdd:
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m, y += sink.stride)
#pragma GCC unroll 8
        for (int n = 0; n < NB; ++n) store(y + n * kLanes, values[m][n] + load(y + n * kLanes));
      return;
    case Store::kSet:
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m, y += sink.stride)
#pragma GCC unroll 8
        for (int n = 0; n < NB; ++n) store(y + n * kLanes, values[m][n]);
  }
}

}  // namespace kllm::KLLM_ISA
