// Products with AMX: 16 rows of activations (A) times a panel of weights (B).
//
// bfloat16: every row count goes through tiles in the same steps of 32 columns, so a row's bits do not depend on the
// batch. The rows of a task are cut into tiles of one size, at most 16, of which the last may overlap the one before:
// overlapping rows are computed twice and written once, and one configuration serves the whole task.
// int8 weights with a scale a row: activations are two bytes a number (I16), which are multiplied apart, in steps of 64
// columns: as many operations as in bfloat16, exact, and weights are read as they are.
// Blocks of 32 columns: their sum is exact and is then scaled as gemm_quantized.h does it, so the bits are those of
// AVX-512, which takes tasks of fewer than 16 rows. On paper, per 16 rows x 16 x 32 columns: a product of tiles takes 16
// cycles, beside about 40 of scaling in other units; the 128 vpdpbusd of AVX-512 take 64, and then scaling.
//
// Tile instructions run beside those of other units: while a tile's products are under way, the results of the tile before
// are brought out row by row.
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

// The sums of NB panels x up to two tiles on their way out: `count` rows in order, of which those from `turn` on are the
// second tile's. Their memory: [2 tiles][NB] tiles of 16 x 16.
struct LeavingRows {
  int panel = 0, count = 0, next = 0, turn = 0;
  int rows[2] = {}, firsts[2] = {};  // the first to be written of each tile, and the tile's own first

  bool second() const { return next >= turn; }
  int row() const { return rows[second()] + next - (second() ? turn : 0); }
  int lane() const { return row() - firsts[second()]; }
};

// Rows [first, first + rows) of a tile, of which those from new_row on are written.
struct TilePlace { int first, rows, new_row; };

// Sums of bfloat16 products.
struct FloatSums {
  const GemmTask& task;
  static constexpr int kTilesOfRows = 2;  // tile m are other rows

  template <int NB>
  KLLM_INLINE void read(const uint8_t* sums, const LeavingRows& at, vf (&values)[NB]) const {
    const float* tile = (const float*)sums + (at.second() * NB * kTileRows + at.lane()) * kLanes;
    for (int n = 0; n < NB; ++n) values[n] = load(tile + n * kTileRows * kLanes);
  }
};

// Sums of high and of low bytes, the tiles of the same rows.
struct ByteSums {
  const GemmTask& task;
  static constexpr int kTilesOfRows = 1;

  template <int NB>
  KLLM_INLINE void read(const uint8_t* sums, const LeavingRows& at, vf (&values)[NB]) const {
    constexpr int kTile = kTileRows * kLanes;
    const Activations& x = *task.x;
    const int row = at.row();
    const int32_t* tile = (const int32_t*)sums + at.lane() * kLanes;
    const vi offsets[2] = {offset(x.sums[2 * row]), offset(x.sums[2 * row + 1])};
    for (int n = 0; n < NB; ++n) {
      const vf high = to_float(iload(tile + n * kTile) - offsets[0]), low = to_float(iload(tile + (NB + n) * kTile) - offsets[1]);
      const vf scale = load(task.matrix->row_scales + (at.panel + n) * kPanelRows) * set1(x.scales[row]);
      values[n] = fma(low, set1(1.0f / 254), high) * scale;
    }
  }

 private:
  // Of stored weights, which are 128 more. Sums of what was not finite may be any number.
  static KLLM_INLINE vi offset(int32_t sum) { return iset1((int32_t)((uint32_t)sum * 128u)); }
};

// Where tiles leave their sums, and what brings these out.
template <class Sums, int NB>
class Leaving {
 public:
  explicit Leaving(const GemmTask& task) : task_(task), sums_{task} {}

  // Room for the sums of a tile whose products end before put() is called.
  uint8_t* room() { return (uint8_t*)memory_[turn_ ^ 1]; }

  // The sums in room() are those of these tiles. Rows that are still on their way are brought out before.
  void put(int panel, TilePlace first, TilePlace second) {
    while (step()) {}
    turn_ ^= 1;
    const int rows = first.first + first.rows - first.new_row;
    at_ = {panel, rows, 0, rows, {first.new_row, second.new_row}, {first.first, second.first}};
    if (Sums::kTilesOfRows == 2) at_.count += second.first + second.rows - second.new_row;
  }

  // Brings one row out. False: there was none.
  KLLM_INLINE bool step() {
    if (at_.next >= at_.count) return false;
    vf values[1][NB];
    sums_.template read<NB>((const uint8_t*)memory_[turn_], at_, values[0]);
    sink_tile<1, NB>(*task_.sink, *task_.matrix, at_.row(), at_.panel, values);
    ++at_.next;
    return true;
  }
  int left() const { return at_.count - at_.next; }

 private:
  const GemmTask& task_;
  const Sums sums_;
  LeavingRows at_;
  int turn_ = 0;
  alignas(64) float memory_[2][kSumTiles * kTileRows * kLanes];
};

struct Bf16Products {
  using Sums = FloatSums;
  template <int C, int A, int B>
  static KLLM_INLINE void dot() { tile_dot_bf16<C, A, B>(); }
};
struct ByteProducts {
  using Sums = ByteSums;
  template <int C, int A, int B>
  static KLLM_INLINE void dot() { tile_dot_s8u8<C, A, B>(); }
};

// 64 bytes of two rows of A tiles, `more_x` the second's, times those of NB panels.
template <class Products, int MT, int NB, int N>
KLLM_INLINE void add_step(const uint8_t* weights) {
  if constexpr (N < NB) {
    constexpr int tile = kPanelTile + N % 2;
    load_tile<tile>(weights, kTileRowBytes);
    Products::template dot<N, kRowTile, tile>();
    if constexpr (MT == 2) Products::template dot<NB + N, kRowTile + 1, tile>();
  }
}

// Panels whose weights lie `stride` bytes apart, in `steps` steps of a tile.
struct PanelTiles {
  const uint8_t* weights;
  size_t stride;
  int panel, steps;
};

// MT tiles of rows at x (`x_stride` bytes from row to row) x NB panels, to `leaving`.
template <class Products, int MT, int NB, class Out>
KLLM_INLINE void multiply_tiles(const uint8_t* const (&x)[2], size_t x_stride, const PanelTiles& panels, Out& leaving,
                                PanelsAhead& ahead_of_task) {
  static_assert(MT <= 2 && MT * NB <= kSumTiles);
  PanelsAhead ahead = ahead_of_task;
  const int share = (leaving.left() + panels.steps - 1) / panels.steps;
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  const uint8_t* weights = panels.weights;
  for (int step = 0; step < panels.steps; ++step) {
    load_tile<kRowTile>(x[0] + step * kTileRowBytes, x_stride);
    if constexpr (MT == 2) load_tile<kRowTile + 1>(x[1] + step * kTileRowBytes, x_stride);
    add_step<Products, MT, NB, 0>(weights);
    add_step<Products, MT, NB, 1>(weights + panels.stride);
    add_step<Products, MT, NB, 2>(weights + 2 * panels.stride);
    add_step<Products, MT, NB, 3>(weights + 3 * panels.stride);
    for (int row = 0; row < share; ++row) leaving.step();
    ahead.fetch();
    weights += kTileRows * kTileRowBytes;
  }
  ahead_of_task = ahead;
  constexpr int kTileBytes = kTileRows * kTileRowBytes;
  uint8_t* sums = leaving.room();
  store_tile<0>(sums, kTileRowBytes);
  store_tile<1>(sums + kTileBytes, kTileRowBytes);
  store_tile<2>(sums + 2 * kTileBytes, kTileRowBytes);
  store_tile<3>(sums + 3 * kTileBytes, kTileRowBytes);
}

// The NB panels after `panel`, fetched while those are walked `calls` times in `steps` steps.
inline PanelsAhead panels_ahead(const Matrix& matrix, int panel, int panels, int calls, int steps) {
  const int lines = (int)(panels * matrix.panel_bytes / 64), fetches = calls * steps;
  return {matrix.panel(panel + panels), (lines + fetches - 1) / fetches};
}

// All rows, NB panels, their weights as bfloat16. One row tile: all panels at a time; else two row tiles x two panels, which
// loads each tile for two products.
template <int NB>
class Bf16Group {
 public:
  explicit Bf16Group(const GemmTask& task)
      : task_(task), rows_(task), steps_(task.matrix->padded_cols / kStep), wide_(task), square_(task) {}

  void multiply(int panel) {
    const Matrix& matrix = *task_.matrix;
    if (matrix.format == Format::kBF16) return multiply(panel, matrix.panel(panel), matrix.panel_bytes);
    const size_t bytes = (size_t)matrix.padded_cols * kPanelRows * 2;
    uint8_t* scratch = (uint8_t*)task_.scratch;
    for (int n = 0; n < NB; ++n) dequantize_panel_bf16(matrix, panel + n, (uint16_t*)(scratch + n * bytes));
    multiply(panel, scratch, bytes);
  }
  ~Bf16Group() {
    while (wide_.step()) {}
    while (square_.step()) {}
  }

 private:
  static constexpr int kPair = std::min(NB, 2);

  void multiply(int panel, const uint8_t* weights, size_t stride) {
    const size_t x_stride = (size_t)task_.x->stride * 2;
    const int calls = rows_.count / 2 * (NB / kPair) + rows_.count % 2;
    PanelsAhead ahead = panels_ahead(*task_.matrix, panel, NB, calls, steps_);
    int tile = 0;
    for (; tile + 2 <= rows_.count; tile += 2)
      for (int n = 0; n < NB; n += kPair) {
        const uint8_t* x[2] = {task_.x->row(rows_.first(tile)), task_.x->row(rows_.first(tile + 1))};
        multiply_tiles<Bf16Products, 2, kPair>(x, x_stride, {weights + n * stride, stride, panel + n, steps_}, square_, ahead);
        square_.put(panel + n, place(tile), place(tile + 1));
      }
    if (tile == rows_.count) return;
    const uint8_t* x[2] = {task_.x->row(rows_.first(tile)), nullptr};
    multiply_tiles<Bf16Products, 1, NB>(x, x_stride, {weights, stride, panel, steps_}, wide_, ahead);
    wide_.put(panel, place(tile), {});
  }

  TilePlace place(int tile) const { return {rows_.first(tile), rows_.rows, rows_.new_row(tile)}; }

  const GemmTask& task_;
  const RowTiles rows_;
  const int steps_;
  Leaving<FloatSums, NB> wide_;
  Leaving<FloatSums, kPair> square_;
};

template <int NB>
void bf16_groups(const GemmTask& task, int& panel) {
  if (panel + NB > task.panel_end) return;
  Bf16Group<NB> group(task);
  for (; panel + NB <= task.panel_end; panel += NB) group.multiply(panel);
}

inline void gemm_bf16_tiles(const GemmTask& task) {
  const TilesInUse tiles(product_tiles(RowTiles(task).rows, kTileRowBytes));
  int panel = task.panel;
  bf16_groups<4>(task, panel);
  bf16_groups<2>(task, panel);
  bf16_groups<1>(task, panel);
}

// ---- int8 weights, two bytes an activation ----

constexpr int kByteStep = 64;  // columns of bytes in a tile

// Sums are of at most so many products of 127 and 255.
inline bool takes_i16(const Matrix& matrix) {
  return matrix.format == Format::kI8 && matrix.padded_cols % kByteStep == 0 && matrix.padded_cols < 65536;
}

template <int NB>
void i16_panels(const GemmTask& task, int& panel) {
  const RowTiles rows(task);
  const Matrix& matrix = *task.matrix;
  const int steps = matrix.padded_cols / kByteStep;
  const size_t plane = task.x->stride;
  Leaving<ByteSums, NB> leaving(task);
  for (; panel + NB <= task.panel_end; panel += NB) {
    PanelsAhead ahead = panels_ahead(matrix, panel, NB, rows.count, steps);
    for (int tile = 0; tile < rows.count; ++tile) {
      const uint8_t* high = task.x->row(rows.first(tile));
      const uint8_t* x[2] = {high, high + plane};
      multiply_tiles<ByteProducts, 2, NB>(x, 2 * plane, {matrix.panel(panel), matrix.panel_bytes, panel, steps}, leaving, ahead);
      leaving.put(panel, {rows.first(tile), rows.rows, rows.new_row(tile)}, {});
    }
  }
  while (leaving.step()) {}
}

inline void gemm_i16_tiles(const GemmTask& task) {
  const TilesInUse tiles(product_tiles(RowTiles(task).rows, kTileRowBytes));
  int panel = task.panel;
  i16_panels<2>(task, panel);
  i16_panels<1>(task, panel);
}

// ---- blocks of 32 columns ----

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

// Sums of a row tile x NB panels, written from row `from` on.
template <int NB>
void sink_tiles(const GemmTask& task, const float (*sums)[kTileRows * kLanes], int panel, int first, int from, int end) {
  for (int row = from; row < end; ++row) {
    vf values[NB];
    for (int n = 0; n < NB; ++n) values[n] = load(sums[n] + (row - first) * kLanes);
    sink_row<NB>(*task.sink, *task.matrix, row, panel, values);
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
  if (task.x->type == Type::kI16) return gemm_i16_tiles(task);
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
