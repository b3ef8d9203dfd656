// Products with AMX: 16 rows of activations (A) times a panel of weights (B), 32 columns an instruction.
//
// bfloat16: every row count goes through tiles in the same steps of 32 columns, so a row's bits do not depend on the
// batch. The rows of a task are cut into tiles of one size, at most 16, of which the last may overlap the one before:
// overlapping rows are computed twice and written once, and one configuration serves the whole task.
// int8: the sum over a group of 32 columns is exact and is then scaled as gemm_quantized.h does it, so the bits are
// those of AVX-512, which takes tasks of fewer than 16 rows. On paper, per 16 rows x 16 x 32 columns: a product of tiles
// takes 16 cycles, beside about 40 of scaling in other units; the 128 vpdpbusd of AVX-512 take 64, and then scaling.
#pragma once

#include <algorithm>
#include <utility>

#include "gemm.h"
#include "gemm_quantized.h"
#include "tiles.h"

namespace kllm::KLLM_ISA {

// Tiles 0 .. 3: sums; 4, 5: activations; 6, 7: weights.
constexpr int kSumTiles = 4, kRowTile = 4, kPanelTile = 6;
constexpr int kStep = 32;  // columns of bfloat16 in a tile

// How the rows of a task are cut: `count` tiles of `rows` rows; tile i starts at first(i) and is written from new_row(i).
struct RowTiles {
  int begin, end, count, rows;

  explicit RowTiles(const GemmTask& task) : begin(task.row), end(task.row_end) {
    count = (end - begin + kTileRows - 1) / kTileRows;
    rows = (end - begin + count - 1) / count;
  }
  // Tiles of 16 rows, of a task that has as many.
  static RowTiles full(const GemmTask& task) {
    RowTiles tiles(task);
    tiles.rows = kTileRows;
    return tiles;
  }
  int first(int tile) const { return std::min(begin + tile * rows, end - rows); }
  int new_row(int tile) const { return begin + tile * rows; }
};

// row_bytes: of activations
inline TileConfig product_tiles(int rows, int row_bytes) {
  TileConfig config;
  for (int tile = 0; tile < kSumTiles; ++tile) config.set(tile, rows, kTileRowBytes);
  for (int tile = kRowTile; tile < kPanelTile; ++tile) config.set(tile, rows, row_bytes);
  for (int tile = kPanelTile; tile < kTileCount; ++tile) config.set(tile, row_bytes / 4, kTileRowBytes);
  return config;
}

// Sums of a row tile x NB panels, written from row `from` on.
template <int NB>
void sink_tiles(const GemmTask& task, const float (*sums)[kTileRows * kLanes], int panel, int first, int from, int end) {
  for (int row = from; row < end; ++row) {
    vf values[NB];
    for (int n = 0; n < NB; ++n) values[n] = load(sums[n] + (row - first) * kLanes);
    sink_row<NB>(*task.sink, *task.matrix, row, panel, values);
  }
}

// 32 columns of panel N of NB times those of MT row tiles.
template <int MT, int NB, int N>
KLLM_INLINE void add_step(const uint8_t* weights) {
  if constexpr (N < NB) {
    constexpr int tile = kPanelTile + N % 2;
    load_tile<tile>(weights, kTileRowBytes);
    tile_dot_bf16<N, kRowTile, tile>();
    if constexpr (MT == 2) tile_dot_bf16<NB + N, kRowTile + 1, tile>();
  }
}

// Row tiles [tile, tile + MT) x NB panels whose weights lie panel_bytes apart.
template <int MT, int NB>
void bf16_tiles(const GemmTask& task, const RowTiles& rows, int tile, const uint8_t* weights, size_t panel_bytes, int panel,
                PanelsAhead& ahead_of_task) {
  static_assert(MT <= 2 && MT * NB <= kSumTiles);
  const size_t x_stride = (size_t)task.x->stride * 2;
  const uint8_t* x = task.x->row(rows.first(tile));
  const uint8_t* more_x = task.x->row(rows.first(tile + MT - 1));
  PanelsAhead ahead = ahead_of_task;
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int step = task.matrix->padded_cols / kStep; step > 0; --step) {
    load_tile<kRowTile>(x, x_stride);
    if constexpr (MT == 2) load_tile<kRowTile + 1>(more_x, x_stride);
    add_step<MT, NB, 0>(weights);
    add_step<MT, NB, 1>(weights + panel_bytes);
    add_step<MT, NB, 2>(weights + 2 * panel_bytes);
    add_step<MT, NB, 3>(weights + 3 * panel_bytes);
    ahead.fetch();
    x += kTileRowBytes;
    more_x += kTileRowBytes;
    weights += kTileRows * kTileRowBytes;
  }
  ahead_of_task = ahead;
  alignas(64) float sums[kSumTiles][kTileRows * kLanes];
  store_tile<0>(sums[0], kTileRowBytes);
  store_tile<1>(sums[1], kTileRowBytes);
  store_tile<2>(sums[2], kTileRowBytes);
  store_tile<3>(sums[3], kTileRowBytes);
  for (int m = 0; m < MT; ++m) {
    const int first = rows.first(tile + m);
    sink_tiles<NB>(task, sums + m * NB, panel, first, rows.new_row(tile + m), first + rows.rows);
  }
}

// The NB panels after `panel`, fetched while those are walked `calls` times in `steps` steps.
inline PanelsAhead panels_ahead(const Matrix& matrix, int panel, int panels, int calls, int steps) {
  const int lines = (int)(panels * matrix.panel_bytes / 64), fetches = calls * steps;
  return {matrix.panel(panel + panels), (lines + fetches - 1) / fetches};
}

// All rows, NB panels: two row tiles x two panels at a time, which loads each tile for two products.
template <int NB>
void bf16_panels(const GemmTask& task, const RowTiles& rows, const uint8_t* weights, size_t panel_bytes, int panel) {
  constexpr int pair = std::min(NB, 2);
  const int calls = rows.count / 2 * (NB / pair) + rows.count % 2;
  PanelsAhead ahead = panels_ahead(*task.matrix, panel, NB, calls, task.matrix->padded_cols / kStep);
  int tile = 0;
  for (; tile + 2 <= rows.count; tile += 2)
    for (int n = 0; n < NB; n += pair)
      bf16_tiles<2, pair>(task, rows, tile, weights + n * panel_bytes, panel_bytes, panel + n, ahead);
  if (tile < rows.count) bf16_tiles<1, NB>(task, rows, tile, weights, panel_bytes, panel, ahead);
}

template <int NB>
void bf16_group(const GemmTask& task, const RowTiles& rows, int panel) {
  const Matrix& matrix = *task.matrix;
  if (matrix.format == Format::kBF16) return bf16_panels<NB>(task, rows, matrix.panel(panel), matrix.panel_bytes, panel);
  const size_t bytes = (size_t)matrix.padded_cols * kPanelRows * 2;
  uint8_t* scratch = (uint8_t*)task.scratch;
  for (int n = 0; n < NB; ++n) dequantize_panel_bf16(matrix, panel + n, (uint16_t*)(scratch + n * bytes));
  bf16_panels<NB>(task, rows, scratch, bytes, panel);
}

inline void gemm_bf16_tiles(const GemmTask& task) {
  const RowTiles rows(task);
  const TilesInUse tiles(product_tiles(rows.rows, kTileRowBytes));
  int panel = task.panel;
  for (; panel + 4 <= task.panel_end; panel += 4) bf16_group<4>(task, rows, panel);
  for (; panel + 2 <= task.panel_end; panel += 2) bf16_group<2>(task, rows, panel);
  if (panel < task.panel_end) bf16_group<1>(task, rows, panel);
}

// ---- int8 ----

constexpr int kGroupBytes = kBlock * kPanelRows;  // weights of 16 rows x 32 columns, one tile of 8 lines

// A panel's numbers as unsigned bytes: where they are, or with nibbles spread out to scratch.
template <Format F>
struct PanelBytes {
  const uint8_t* data;
  size_t step;  // from group to group

  PanelBytes(const Matrix& matrix, int panel, uint8_t* scratch) {
    const PanelReader<F> reader{matrix.panel(panel)};
    if constexpr (line_bytes(F) == kGroupBytes) {
      data = reader.lines(0);
      step = PanelReader<F>::kBytes;
    } else {
      data = scratch;
      step = kGroupBytes;
      for (int block = 0; block < matrix.padded_cols / kBlock; ++block)
        unpack(reader.lines(block), scratch + (size_t)block * kGroupBytes, std::make_integer_sequence<int, 4>{});
    }
  }

 private:
  template <int... J>
  static KLLM_INLINE void unpack(const uint8_t* lines, uint8_t* out, std::integer_sequence<int, J...>) {
    vw low[4], high[4];
    (read_lines<F, J>(lines, low[J], high[J]), ...);
    (wstore(out + 64 * J, low[J]), ...);
    (wstore(out + 64 * (J + 4), high[J]), ...);
  }
};

// results[row] += the scaled sums of one group. Each step is that of add_block in gemm_quantized.h.
template <Format F>
KLLM_INLINE void add_group(const PanelReader<F>& panel, int block, const int32_t* sums, const Activations& x, int first,
                           vf (&results)[kTileRows]) {
  const size_t groups = x.stride / kBlock, at = first * groups + block;
  vf scale = zero(), least = zero();
  if constexpr (F != Format::kI8) scale = panel.scale(block);
  if constexpr (has_least(F)) least = F == Format::kQ4K ? zero() - panel.least(block) : panel.least(block);
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) {
    const int32_t total = x.sums[at + m * groups];
    const vf x_scale = set1(x.scales[at + m * groups]);
    vi sum = iload(sums + m * kLanes);
    if constexpr (offset_of(F) != 0) sum = sum + iset1(total * -offset_of(F));
    vf value = to_float(sum);
    if constexpr (F != Format::kI8) value = value * scale;
    results[m] = fma(value, x_scale, results[m]);
    if constexpr (has_least(F)) results[m] = fma(least, x_scale * to_float(iset1(total)), results[m]);
  }
}

// sums = 16 rows of x times a group of weights, by way of tile C.
template <int C>
KLLM_INLINE void multiply_group(const uint8_t* x, size_t stride, const uint8_t* weights, int32_t* sums) {
  zero_tile<C>();
  load_tile<kRowTile + C % 2>(x, stride);
  load_tile<kPanelTile + C % 2>(weights, kTileRowBytes);
  tile_dot_s8u8<C, kRowTile + C % 2, kPanelTile + C % 2>();
  store_tile<C>(sums, kTileRowBytes);
}

// 16 rows x one panel to `out`. Four groups at a time, so that products of tiles do not wait for each other's results.
template <Format F>
void int8_tile(const GemmTask& task, int first, int panel, const PanelBytes<F>& weights, float* out,
               PanelsAhead& ahead_of_task) {
  const Activations& x = *task.x;
  const PanelReader<F> reader{task.matrix->panel(panel)};
  const int blocks = task.matrix->padded_cols / kBlock;
  PanelsAhead ahead = ahead_of_task;
  vf results[kTileRows];
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) results[m] = zero();
  alignas(64) int32_t sums[kSumTiles][kTileRows * kLanes];
  for (int block = 0; block < blocks; block += kSumTiles) {
    const int count = std::min(kSumTiles, blocks - block);
    const uint8_t* rows = x.row(first) + (size_t)block * kBlock;
    const uint8_t* bytes = weights.data + block * weights.step;
    multiply_group<0>(rows, x.stride, bytes, sums[0]);
    if (count > 1) multiply_group<1>(rows + kBlock, x.stride, bytes + weights.step, sums[1]);
    if (count > 2) multiply_group<2>(rows + 2 * kBlock, x.stride, bytes + 2 * weights.step, sums[2]);
    if (count > 3) multiply_group<3>(rows + 3 * kBlock, x.stride, bytes + 3 * weights.step, sums[3]);
    for (int c = 0; c < count; ++c) {
      ahead.fetch();
      add_group<F>(reader, block + c, sums[c], x, first, results);
    }
  }
  ahead_of_task = ahead;
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) {
    if constexpr (F == Format::kI8) results[m] = results[m] * load(task.matrix->row_scales + panel * kPanelRows);
    store(out + m * kLanes, results[m]);
  }
}

// All rows, NB panels.
template <Format F, int NB>
void int8_panels(const GemmTask& task, const RowTiles& rows, int panel) {
  const Matrix& matrix = *task.matrix;
  const size_t unpacked = (size_t)matrix.padded_cols * kPanelRows;
  PanelsAhead ahead = panels_ahead(matrix, panel, NB, rows.count * NB, matrix.padded_cols / kBlock);
  const PanelBytes<F> weights[2] = {{matrix, panel, (uint8_t*)task.scratch},
                                    {matrix, panel + NB - 1, (uint8_t*)task.scratch + (NB - 1) * unpacked}};
  alignas(64) float sums[NB][kTileRows * kLanes];
  for (int tile = 0; tile < rows.count; ++tile) {
    const int first = rows.first(tile);
    for (int n = 0; n < NB; ++n) int8_tile<F>(task, first, panel + n, weights[n], sums[n], ahead);
    sink_tiles<NB>(task, sums, panel, first, rows.new_row(tile), first + rows.rows);
  }
}

template <Format F>
void gemm_int8_tiles(const GemmTask& task) {
  if (task.row_end - task.row < kTileRows) return gemm_quantized<F>(task);
  const RowTiles rows = RowTiles::full(task);
  const TilesInUse tiles(product_tiles(kTileRows, kBlock));
  int panel = task.panel;
  for (; panel + 2 <= task.panel_end; panel += 2) int8_panels<F, 2>(task, rows, panel);
  if (panel < task.panel_end) int8_panels<F, 1>(task, rows, panel);
}

// The product of the instruction set "amx". Q6_K has a scale for every 16 columns, so little of a tile would be used.
inline void gemm_tiles(const GemmTask& task) {
  if (task.x->type == Type::kF32) return gemm_float<false>(task);
  if (task.x->type == Type::kBF16) return gemm_bf16_tiles(task);
  switch (task.matrix->format) {
    case Format::kI8: return gemm_int8_tiles<Format::kI8>(task);
    case Format::kQ8_0: return gemm_int8_tiles<Format::kQ8_0>(task);
    case Format::kQ4_0: return gemm_int8_tiles<Format::kQ4_0>(task);
    case Format::kQ4_1: return gemm_int8_tiles<Format::kQ4_1>(task);
    case Format::kQ4K: return gemm_int8_tiles<Format::kQ4K>(task);
    default: return gemm_int8(task);
  }
}

}  // namespace kllm::KLLM_ISA
