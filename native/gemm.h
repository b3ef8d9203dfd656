// Products with float activations: float32 and bfloat16 weights as they are, quantised ones dequantised panel by panel.
//
// A micro tile keeps MR rows x NB panels of sums in registers and walks the columns once. A line of weights is 64 bytes
// (16 rows x one float or one bfloat16 pair) and meets 4 bytes of each activation row, so one loop serves both types.
// The panels that come next are brought into the second-level cache on the way, a share in every pass over the rows.
// Every result is one chain of additions in column order, whatever MR and NB are: the same bits in any batch.
#pragma once

#include "dequantize.h"
#include "kernels.h"
#include "simd.h"
#include "sink.h"

namespace kllm::KLLM_ISA {

#if defined(__AVX512F__)
constexpr int max_rows(int panels) { return panels > 4 ? 4 : 6; }
constexpr int kWide = 6, kSquare = 4;  // panels side by side for few rows, for many
#else
constexpr int max_rows(int panels) { return panels > 1 ? 2 : 6; }
constexpr int kWide = 2, kSquare = 2;
#endif

// Where the next panels' share of this pass begins, and how far it goes on with every line.
struct LinesAhead {
  const uint8_t* at;
  size_t step;
};

template <bool BF16, int MR, int NB>
KLLM_INLINE void micro_tile(const GemmTask& task, const uint8_t* weights, size_t panel_bytes, int panel, int row,
                            LinesAhead ahead) {
  const size_t x_stride = (size_t)task.x->stride * size_of(task.x->type);
  const uint8_t* x = task.x->row(row);
  const int lines = task.matrix->padded_cols / (BF16 ? 2 : 1);
  vf acc[MR][NB];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NB; ++n) acc[m][n] = zero();
  for (int line = 0; line < lines; ++line) {
    const uint8_t* w = weights + (size_t)line * 64;
    vw lines_of[NB];
#pragma GCC unroll 8
    for (int n = 0; n < NB; ++n) {
      lines_of[n] = wload(w + n * panel_bytes);
      fetch_l2(ahead.at + n * panel_bytes);
    }
    ahead.at += ahead.step;
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const vw value = wset32(x + m * x_stride + (size_t)line * 4);
#pragma GCC unroll 8
      for (int n = 0; n < NB; ++n)
        acc[m][n] = BF16 ? dot_bf16(acc[m][n], lines_of[n], value)
                         : fma(as_float(lines_of[n]), as_float(value), acc[m][n]);
    }
  }
  sink_tile(*task.sink, *task.matrix, row, panel, acc);
}

// All rows of the task, NB panels; rows are spread evenly over as few passes as the registers allow.
template <bool BF16, int NB>
void multiply_panels(const GemmTask& task, const uint8_t* weights, size_t panel_bytes, int panel) {
  const int rows = task.row_end - task.row, passes = (rows + max_rows(NB) - 1) / max_rows(NB);
  LinesAhead ahead{weights + NB * panel_bytes, (size_t)64 / passes};
  for (int pass = 0, row = task.row; pass < passes; ++pass) {
    const int count = (task.row_end - row + passes - pass - 1) / (passes - pass);
    if (passes > kCachedPasses) fetch_tile<NB>(*task.sink, row, count, panel);
    switch (count) {
      case 1: micro_tile<BF16, 1, NB>(task, weights, panel_bytes, panel, row, ahead); break;
      case 2: micro_tile<BF16, 2, NB>(task, weights, panel_bytes, panel, row, ahead); break;
      case 3: if constexpr (max_rows(NB) >= 3) micro_tile<BF16, 3, NB>(task, weights, panel_bytes, panel, row, ahead); break;
      case 4: if constexpr (max_rows(NB) >= 4) micro_tile<BF16, 4, NB>(task, weights, panel_bytes, panel, row, ahead); break;
      case 5: if constexpr (max_rows(NB) >= 5) micro_tile<BF16, 5, NB>(task, weights, panel_bytes, panel, row, ahead); break;
      case 6: if constexpr (max_rows(NB) >= 6) micro_tile<BF16, 6, NB>(task, weights, panel_bytes, panel, row, ahead); break;
    }
    row += count;
    ahead.at += panel_bytes / passes;
  }
}

template <bool BF16, int NB>
void multiply_group(const GemmTask& task, int panel) {
  const Matrix& matrix = *task.matrix;
  if (matrix.format == (BF16 ? Format::kBF16 : Format::kF32)) {
    multiply_panels<BF16, NB>(task, matrix.panel(panel), matrix.panel_bytes, panel);
    return;
  }
  const size_t bytes = (size_t)matrix.padded_cols * kPanelRows * (BF16 ? 2 : 4);
  uint8_t* scratch = (uint8_t*)task.scratch;
  for (int n = 0; n < NB; ++n) {
    if constexpr (BF16) dequantize_panel_bf16(matrix, panel + n, (uint16_t*)(scratch + n * bytes));
    else dequantize_panel(matrix, panel + n, (float*)(scratch + n * bytes));
  }
  multiply_panels<BF16, NB>(task, scratch, bytes, panel);
}

template <bool BF16>
void gemm_float(const GemmTask& task) {
  const int rows = task.row_end - task.row;
  int panel = task.panel;
  if (rows <= max_rows(kWide))
    for (; panel + kWide <= task.panel_end; panel += kWide) multiply_group<BF16, kWide>(task, panel);
  for (; panel + kSquare <= task.panel_end; panel += kSquare) multiply_group<BF16, kSquare>(task, panel);
  for (; panel + 2 <= task.panel_end; panel += 2) multiply_group<BF16, 2>(task, panel);
  if (panel < task.panel_end) multiply_group<BF16, 1>(task, panel);
}

}  // namespace kllm::KLLM_ISA
