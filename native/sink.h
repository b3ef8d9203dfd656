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

}  // namespace kllm::KLLM_ISA
