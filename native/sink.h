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

// Where the float results of whole panels from `panel` on go in `row`.
inline float* place(const Sink& sink, int row, int panel) {
  const int first = (sink.store == Store::kGated ? panel / 2 : panel) * kPanelRows;
  return (float*)sink.y + row * sink.stride + first;
}

// Asks for the memory that sink_tile of these rows and panels is going to write. A function of its own: within a tile's it
// takes registers that the products need.
template <int NB>
__attribute__((noinline)) void fetch_tile(const Sink& sink, int row, int rows, int panel) {
  if (sink.type != Type::kF32) return;
  const int lines = sink.store == Store::kGated ? NB / 2 : NB;
  const float* y = place(sink, row, panel);
  for (int m = 0; m < rows; ++m, y += sink.stride)
    for (int line = 0; line < lines; ++line) fetch_to_write(y + line * kLanes);
}

template <int NB>
__attribute__((noinline)) void sink_rows(const Sink& sink, const Matrix& matrix, int row, int rows, int panel,
                                         const vf* values) {
  for (int m = 0; m < rows; ++m) sink_row<NB>(sink, matrix, row + m, panel, values + m * NB);
}

// sink_row for the rows of a tile. Asked row by row what is to be done with them, a tile of 576 columns took 4 % longer, so
// the usual case (whole panels, floats, no bias) is decided once, and its values stay in registers.
template <int MR, int NB>
KLLM_INLINE void sink_tile(const Sink& sink, const Matrix& matrix, int row, int panel, const vf (&values)[MR][NB]) {
  if (sink.type != Type::kF32 || sink.bias || matrix.row_count(panel + NB - 1) != kPanelRows)
    return sink_rows<NB>(sink, matrix, row, MR, panel, values[0]);
  float* y = place(sink, row, panel);
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
