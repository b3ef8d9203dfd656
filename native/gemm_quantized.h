// Products of int8 activations and quantised weights, which stay packed: nibbles become bytes in registers.
//
// Within 32 columns numbers are summed exactly, in int32; each such sum is scaled and added to a float, block after
// block. So a result depends on its row and its weights only, not on the tile that it is computed in.
// Stored weights are unsigned, q = stored - offset: what the offset adds is taken off with the sum of the activations.
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "simd.h"
#include "sink.h"

namespace kllm::KLLM_ISA {

// Exact sums of products, one a lane, `start` more than what is stored gives: begin, add lines, end.
#if defined(__AVX512F__)

template <Format>
KLLM_INLINE vi begin_sum(vi start) { return start; }
template <Format>
KLLM_INLINE vi add_line(vi sum, vw w, vw a) { return dot_u8s8(sum, w, a); }
template <Format>
KLLM_INLINE vi end_sum(vi sum, vi) { return sum; }

// Rows at a time with so many panels side by side. Few rows wait for memory, which streams of more panels keep busier.
constexpr int max_rows_int8(int panels) { return panels > 4 ? 2 : panels > 2 ? 4 : 6; }
constexpr int kPanelsInt8 = 6;

#else

// vpmaddubsw adds two products in 16 bits. That has room for 2 * 127 * 15, eight times over, of nibbles; for
// 2 * 127 * 63 of Q6_K; and for 2 * 127 * 128 of bytes made signed again, whose sign is given to the activation.
template <Format F>
constexpr bool kSigned = line_bytes(F) == 512;
KLLM_INLINE __m256i pairs(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

template <Format F>
KLLM_INLINE __m256i add_half_line(__m256i sum, __m256i w, __m256i a) {
  if constexpr (kSigned<F>) {
    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    return _mm256_add_epi32(sum, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))));
  }
  const __m256i words = _mm256_maddubs_epi16(w, a);
  return has_nibbles(F) ? _mm256_add_epi16(sum, words) : _mm256_add_epi32(sum, pairs(words));
}
template <Format>
KLLM_INLINE vi begin_sum(vi) { return izero(); }
template <Format F>
KLLM_INLINE vi add_line(vi sum, vw w, vw a) { return {add_half_line<F>(sum.a, w.a, a.a), add_half_line<F>(sum.b, w.b, a.b)}; }
template <Format F>
KLLM_INLINE vi end_sum(vi sum, vi start) {
  if (kSigned<F>) return sum;
  return has_nibbles(F) ? vi{pairs(sum.a), pairs(sum.b)} + start : sum + start;
}

constexpr int max_rows_int8(int panels) { return panels > 1 ? 2 : 4; }
constexpr int kPanelsInt8 = 2;

#endif

// Where a tile of MR rows x NB panels reads from.
template <Format F, int NB>
struct TileSource {
  PanelReader<F> panels[NB];
  const int8_t* x;       // the first row
  const float* scales;   // of its groups
  const int32_t* sums;
  size_t stride, groups; // from row to row
};

// The lines of groups J and J + 4 of a block. halves: 1, or 2 where columns 16 .. 31 have a scale of their own.
template <Format F, int J, int MR, int NB, int Halves>
KLLM_INLINE void add_lines(const TileSource<F, NB>& source, int block, vi (&sums)[MR][NB][Halves]) {
  vw low[NB], high[NB];
#pragma GCC unroll 8
  for (int n = 0; n < NB; ++n)
    read_lines<F, J>(source.panels[n].lines(block), low[n], high[n]);
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    const int8_t* x = source.x + m * source.stride + (size_t)block * kBlock + 4 * J;
    const vw first = wset32(x), second = wset32(x + 16);
#pragma GCC unroll 8
    for (int n = 0; n < NB; ++n) {
      sums[m][n][0] = add_line<F>(sums[m][n][0], low[n], first);
      sums[m][n][Halves - 1] = add_line<F>(sums[m][n][Halves - 1], high[n], second);
    }
  }
}

// Minus the offset times the sum of a row's activations, for each half of the block that has its own scale.
template <Format F, int Halves>
KLLM_INLINE void start_sums(const int8_t* x, int32_t total, vi (&start)[Halves]) {
  if constexpr (Halves == 2) {
    const vw ones = repeat_byte(1);
    vi half = izero();
    for (int j = 0; j < 16; j += 4) half = dot_u8s8(half, ones, wset32(x + j));
    start[0] = half * iset1(-offset_of(F));
    start[1] = iset1(total) * iset1(-offset_of(F)) - start[0];
  } else {
    start[0] = offset_of(F) ? iset1(total) * iset1(-offset_of(F)) : izero();
  }
}

// results += one block, rows x panels.
template <Format F, int MR, int NB>
KLLM_INLINE void add_block(const TileSource<F, NB>& source, int block, vf (&results)[MR][NB]) {
  constexpr int halves = F == Format::kQ6K ? 2 : 1;
  vi sums[MR][NB][halves], start[MR][halves];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    start_sums<F>(source.x + m * source.stride + (size_t)block * kBlock, source.sums[m * source.groups + block], start[m]);
#pragma GCC unroll 8
    for (int n = 0; n < NB; ++n)
      for (int half = 0; half < halves; ++half) sums[m][n][half] = begin_sum<F>(start[m][half]);
  }
  add_lines<F, 0>(source, block, sums);
  add_lines<F, 1>(source, block, sums);
  add_lines<F, 2>(source, block, sums);
  add_lines<F, 3>(source, block, sums);
#pragma GCC unroll 8
  for (int n = 0; n < NB; ++n) {
    const PanelReader<F>& panel = source.panels[n];
    vf scale = zero(), least = zero();
    vi parts[2] = {izero(), izero()};
    if constexpr (F != Format::kI8) scale = panel.scale(block);
    if constexpr (has_least(F)) least = F == Format::kQ4K ? zero() - panel.least(block) : panel.least(block);
    if constexpr (halves == 2)
      for (int half = 0; half < 2; ++half) parts[half] = panel.half_scale(block, half);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const vf x_scale = set1(source.scales[m * source.groups + block]);
      vi total = end_sum<F>(sums[m][n][0], start[m][0]);
      if constexpr (halves == 2) total = total * parts[0] + end_sum<F>(sums[m][n][1], start[m][1]) * parts[1];
      vf value = to_float(total);
      if constexpr (F != Format::kI8) value = value * scale;
      results[m][n] = fma(value, x_scale, results[m][n]);
      if constexpr (has_least(F))
        results[m][n] = fma(least, x_scale * to_float(iset1(source.sums[m * source.groups + block])), results[m][n]);
    }
  }
}

// A share of the panels that come next, brought into the second-level cache while these are multiplied. Memory is then
// read without a pause: measured on Zen 4 (one core, weights in memory), 22 GB/s instead of 17 for one row of int8, 21
// instead of 10 for eight. Prefetching within the panel at hand made it slower. Past the last panel nothing is read.
struct PanelsAhead {
  const uint8_t* at;
  int lines_per_block;

  KLLM_INLINE void fetch() {
    for (int i = 0; i < lines_per_block; ++i, at += 64) _mm_prefetch((const char*)at, _MM_HINT_T1);
  }
};

template <Format F, int MR, int NB>
void quantized_tile(const GemmTask& task, int row, int panel, PanelsAhead ahead) {
  const Activations& x = *task.x;
  const size_t groups = x.stride / kBlock;
  TileSource<F, NB> source{{}, (const int8_t*)x.row(row), x.scales + row * groups, x.sums + row * groups, (size_t)x.stride, groups};
  for (int n = 0; n < NB; ++n) source.panels[n].panel = task.matrix->panel(panel + n);
  vf results[MR][NB];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NB; ++n) results[m][n] = zero();
  for (int block = 0; block < task.matrix->padded_cols / kBlock; ++block) {
    ahead.fetch();
    add_block<F>(source, block, results);
  }
  if constexpr (F == Format::kI8) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < NB; ++n) results[m][n] = results[m][n] * load(task.matrix->row_scales + (panel + n) * kPanelRows);
  }
  sink_tile<MR, NB>(*task.sink, *task.matrix, row, panel, results);
}

// All rows of the task, NB panels; rows are spread evenly over as few passes as the registers allow.
template <Format F, int NB>
void quantized_panels(const GemmTask& task, int panel) {
  constexpr int most = max_rows_int8(NB);
  const int passes = (task.row_end - task.row + most - 1) / most;
  constexpr int lines = NB * (int)PanelReader<F>::kBytes / (is_super(F) ? 8 : 1) / 64;
  PanelsAhead ahead{task.matrix->panel(panel + NB), (lines + passes - 1) / passes};
  for (int pass = 0, row = task.row; pass < passes; ++pass) {
    const int count = (task.row_end - row + passes - pass - 1) / (passes - pass);
    if (passes > kCachedPasses) fetch_tile<NB>(*task.sink, row, count, panel);
    switch (count) {
      case 1: quantized_tile<F, 1, NB>(task, row, panel, ahead); break;
      case 2: quantized_tile<F, 2, NB>(task, row, panel, ahead); break;
      case 3: if constexpr (most >= 3) quantized_tile<F, 3, NB>(task, row, panel, ahead); break;
      case 4: if constexpr (most >= 4) quantized_tile<F, 4, NB>(task, row, panel, ahead); break;
      case 5: if constexpr (most >= 5) quantized_tile<F, 5, NB>(task, row, panel, ahead); break;
      case 6: if constexpr (most >= 6) quantized_tile<F, 6, NB>(task, row, panel, ahead); break;
    }
    row += count;
    ahead.at += (size_t)ahead.lines_per_block * 64 * (task.matrix->padded_cols / kBlock);
  }
}

template <Format F, int NB>
void quantized_groups(const GemmTask& task, int& panel) {
  for (; panel + NB <= task.panel_end; panel += NB) quantized_panels<F, NB>(task, panel);
}

template <Format F>
void gemm_quantized(const GemmTask& task) {
  const int rows = task.row_end - task.row;
  int panel = task.panel;
  if constexpr (kPanelsInt8 > 2) {
    if (rows <= max_rows_int8(6)) quantized_groups<F, 6>(task, panel);
    if (rows <= max_rows_int8(4)) quantized_groups<F, 4>(task, panel);
  }
  quantized_groups<F, 2>(task, panel);
  quantized_groups<F, 1>(task, panel);
}

// x is I8, and the matrix of a format other than F32 and BF16.
inline void gemm_int8(const GemmTask& task) {
  switch (task.matrix->format) {
    case Format::kI8: return gemm_quantized<Format::kI8>(task);
    case Format::kQ8_0: return gemm_quantized<Format::kQ8_0>(task);
    case Format::kQ4_0: return gemm_quantized<Format::kQ4_0>(task);
    case Format::kQ4_1: return gemm_quantized<Format::kQ4_1>(task);
    case Format::kQ4K: return gemm_quantized<Format::kQ4K>(task);
    case Format::kQ6K: return gemm_quantized<Format::kQ6K>(task);
    case Format::kF32:
    case Format::kBF16: return;
  }
}

}  // namespace kllm::KLLM_ISA
