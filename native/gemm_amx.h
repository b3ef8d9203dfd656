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

// Sums of bfloat16 products, as they are in memory: [rows][NB panels].
template <int NB>
struct FloatSums {
  static constexpr int kTiles = NB;  // of a row

  FloatSums(const GemmTask&, int /*panel*/, int /*row*/) {}
  KLLM_INLINE void read(const uint8_t* sums, vf (&values)[NB]) const {
    for (int n = 0; n < NB; ++n) values[n] = load((const float*)sums + n * kLanes);
  }
  KLLM_INLINE void next() {}
};

// Sums of high and of low bytes: [rows][2][NB panels].
template <int NB>
class ByteSums {
 public:
  static constexpr int kTiles = 2 * NB;

  ByteSums(const GemmTask& task, int panel, int row) : x_scales_(task.x->scales + row), x_sums_(task.x->sums + 2 * row) {
    for (int n = 0; n < NB; ++n) scales_[n] = load(task.matrix->row_scales + (panel + n) * kPanelRows);
  }
  KLLM_INLINE void read(const uint8_t* sums, vf (&values)[NB]) const {
    const int32_t* at = (const int32_t*)sums;
    const vi offsets[2] = {offset(x_sums_[0]), offset(x_sums_[1])};
    const vf x_scale = set1(*x_scales_);
    for (int n = 0; n < NB; ++n) {
      const vf high = to_float(iload(at + n * kLanes) - offsets[0]);
      const vf low = to_float(iload(at + (NB + n) * kLanes) - offsets[1]);
      values[n] = fma(low, set1(1.0f / 254), high) * (scales_[n] * x_scale);
    }
  }
  KLLM_INLINE void next() { ++x_scales_, x_sums_ += 2; }

 private:
  // Of stored weights, which are 128 more. Sums of what was not finite may be any number.
  static KLLM_INLINE vi offset(int32_t sum) { return iset1((int32_t)((uint32_t)sum * 128u)); }

  const float* x_scales_;
  const int32_t* x_sums_;
  vf scales_[NB];
};

// Rows of sums on their way out, one below the other. A copy of its own is what a loop works with: it stays in registers,
// and there is nothing to ask but whether there is another row. With its state in memory and a few jumps a row, bringing
// results out added two thirds to the time of int8 products; so it adds one third, most of it for writes to memory.
template <class Sums, Leave kLeave, int NB>
class RowsOut {
 public:
  static constexpr int kRowBytes = Sums::kTiles * kTileRowBytes;

  RowsOut(const GemmTask& task, const uint8_t* sums, int panel, int row, int count)
      : at_(sums), left_(count), row_(row), panel_(panel), reader_(task, panel, row) {
    step_ = task.sink->stride * size_of(task.sink->type);
    y_ = place(*task.sink, row, panel);
  }

  int left() const { return left_; }

  KLLM_INLINE void step(const GemmTask& task) {
    vf values[NB];
    reader_.read(at_, values);
    if constexpr (kLeave == Leave::kOther) sink_rows<NB>(*task.sink, *task.matrix, row_++, 1, panel_, values);
    else write_row<kLeave, NB>(y_, values);
    at_ += kRowBytes;
    y_ += step_;
    reader_.next();
    --left_;
  }

 private:
  const uint8_t* at_;
  uint8_t* y_;
  size_t step_;
  int left_, row_, panel_;
  Sums reader_;
};

// Where tiles leave their sums, and what brings these out while the next ones are multiplied.
template <class Sums, Leave kLeave, int NB>
class Leaving {
 public:
  using Rows = RowsOut<Sums, kLeave, NB>;
  static constexpr int kRowBytes = Rows::kRowBytes;

  explicit Leaving(const GemmTask& task) : task_(task), rows_(task, nullptr, task.panel, task.row, 0) {}

  // Room for the sums of a tile whose products end before put() is called.
  uint8_t* room() { return memory_[turn_ ^ 1]; }

  Rows& rows() { return rows_; }

  // The sums in room() are those of rows [first, end), of which those from new_row on are to be brought out. Rows that
  // are still on their way are brought out before.
  void put(int panel, int first, int new_row, int end) {
    drain();
    turn_ ^= 1;
    rows_ = Rows(task_, memory_[turn_] + (new_row - first) * kRowBytes, panel, new_row, end - new_row);
  }

  void drain() {
    Rows rows = rows_;
    while (rows.left() > 0) rows.step(task_);
    rows_ = rows;
  }

 private:
  static constexpr int kApart = 576;  // some lines: loads do not wait for stores at the same place of another page
  const GemmTask& task_;
  Rows rows_;
  int turn_ = 0;
  alignas(64) uint8_t memory_[2][kSumTiles * kTileRows * kTileRowBytes + kApart];
};

struct Bf16Products {
  template <int C, int A, int B>
  static KLLM_INLINE void dot() { tile_dot_bf16<C, A, B>(); }
};
struct ByteProducts {
  template <int C, int A, int B>
  static KLLM_INLINE void dot() { tile_dot_s8u8<C, A, B>(); }
};

// One or two tiles of rows, which have been loaded, times a tile of panel N.
template <class Products, int MT, int NB, int N>
KLLM_INLINE void add_step(const uint8_t* weights) {
  if constexpr (N < NB) {
    constexpr int tile = kPanelTile + N % 2;
    load_tile<tile>(weights, kTileRowBytes);
    Products::template dot<N, kRowTile, tile>();
    if constexpr (MT == 2) Products::template dot<NB + N, kRowTile + 1, tile>();
  }
}

// The sums of two rows of tiles, a row's side by side.
template <int MT, int NB, int N>
KLLM_INLINE void store_sums(uint8_t* out, const int (&down)[2], size_t stride) {
  if constexpr (N < MT * NB) {
    store_tile<N>(out + down[N / NB] + N % NB * kTileRowBytes, stride);
    store_sums<MT, NB, N + 1>(out, down, stride);
  }
}

// Panels whose weights lie `stride` bytes apart, in `steps` steps of a tile.
struct PanelTiles {
  const uint8_t* weights;
  size_t stride;
  int steps;
};

// MT tiles of rows at x (`x_stride` bytes from row to row) x NB panels, to `leaving`: tile m's rows from `down[m]` bytes on.
template <class Products, int MT, int NB, class Out>
KLLM_INLINE void multiply_tiles(const GemmTask& task, const uint8_t* const (&x)[2], size_t x_stride, const PanelTiles& panels,
                                const int (&down)[2], Out& leaving, PanelsAhead& ahead_of_task) {
  static_assert(MT <= 2 && MT * NB <= kSumTiles);
  PanelsAhead ahead = ahead_of_task;
  auto rows = leaving.rows();
  const int share = (rows.left() + panels.steps - 1) / panels.steps;
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  const uint8_t* weights = panels.weights;
  for (int step = 0; step < panels.steps; ++step) {
    stream_tile<kRowTile>(x[0] + step * kTileRowBytes, x_stride);
    if constexpr (MT == 2) stream_tile<kRowTile + 1>(x[1] + step * kTileRowBytes, x_stride);
    add_step<Products, MT, NB, 0>(weights);
    add_step<Products, MT, NB, 1>(weights + panels.stride);
    add_step<Products, MT, NB, 2>(weights + 2 * panels.stride);
    add_step<Products, MT, NB, 3>(weights + 3 * panels.stride);
    for (int now = std::min(share, rows.left()); now > 0; --now) rows.step(task);
    ahead.fetch();
    weights += kTileRows * kTileRowBytes;
  }
  ahead_of_task = ahead;
  leaving.rows() = rows;
  store_sums<MT, NB, 0>(leaving.room(), down, Out::kRowBytes);
}

// The NB panels after `panel`, fetched while those are walked `calls` times in `steps` steps.
inline PanelsAhead panels_ahead(const Matrix& matrix, int panel, int panels, int calls, int steps) {
  const int lines = (int)(panels * matrix.panel_bytes / 64), fetches = calls * steps;
  return {matrix.panel(panel + panels), (lines + fetches - 1) / fetches};
}

// All rows, NB panels, their weights as bfloat16. Two row tiles x two panels load each tile for two products; the two
// panels stay in the first-level cache until the last row. A single row tile takes as many panels as there are sums for.
template <Leave kLeave, int NB>
class Bf16Group {
 public:
  explicit Bf16Group(const GemmTask& task)
      : task_(task), rows_(task), steps_(task.matrix->padded_cols / kStep), leaving_(task) {}

  void multiply(int panel) {
    const Matrix& matrix = *task_.matrix;
    if (matrix.format == Format::kBF16) return multiply(panel, matrix.panel(panel), matrix.panel_bytes);
    const size_t bytes = (size_t)matrix.padded_cols * kPanelRows * 2;
    uint8_t* scratch = (uint8_t*)task_.scratch;
    for (int n = 0; n < NB; ++n) dequantize_panel_bf16(matrix, panel + n, (uint16_t*)(scratch + n * bytes));
    multiply(panel, scratch, bytes);
  }
  ~Bf16Group() { leaving_.drain(); }

 private:
  void multiply(int panel, const uint8_t* weights, size_t stride) {
    const PanelTiles panels{weights, stride, steps_};
    PanelsAhead ahead = panels_ahead(*task_.matrix, panel, NB, (rows_.count + 1) / 2, steps_);
    int tile = 0;
    if constexpr (NB <= 2)
      for (; tile + 2 <= rows_.count; tile += 2) multiply_rows<2>(tile, panel, panels, ahead);
    for (; tile < rows_.count; ++tile) multiply_rows<1>(tile, panel, panels, ahead);
  }

  template <int MT>
  void multiply_rows(int tile, int panel, const PanelTiles& panels, PanelsAhead& ahead) {
    const int first = rows_.first(tile), last = rows_.first(tile + MT - 1);
    const uint8_t* x[2] = {task_.x->row(first), task_.x->row(last)};
    const int down[2] = {0, (last - first) * leaving_.kRowBytes};  // rows that are in both tiles have the same sums
    multiply_tiles<Bf16Products, MT, NB>(task_, x, (size_t)task_.x->stride * 2, panels, down, leaving_, ahead);
    leaving_.put(panel, first, rows_.new_row(tile), last + rows_.rows);
  }

  const GemmTask& task_;
  const RowTiles rows_;
  const int steps_;
  Leaving<FloatSums<NB>, kLeave, NB> leaving_;
};

template <Leave kLeave, int NB>
void bf16_groups(const GemmTask& task, int& panel) {
  if (panel + NB > task.panel_end) return;
  Bf16Group<kLeave, NB> group(task);
  for (; panel + NB <= task.panel_end; panel += NB) group.multiply(panel);
}

struct Bf16Panels {
  template <Leave kLeave>
  static void multiply(const GemmTask& task) {
    int panel = task.panel;
    if (RowTiles(task).count == 1) bf16_groups<kLeave, 4>(task, panel);
    bf16_groups<kLeave, 2>(task, panel);
    bf16_groups<kLeave, 1>(task, panel);
  }
};

// All panels of a task: whole ones, then one that may not be.
template <class Panels>
void multiply_task(const GemmTask& task) {
  const TilesInUse tiles(product_tiles(RowTiles(task).rows, kTileRowBytes));
  GemmTask whole = task, rest = task;
  while (whole.panel_end > whole.panel && task.matrix->row_count(whole.panel_end - 1) < kPanelRows) --whole.panel_end;
  if (task.matrix->gated) whole.panel_end -= (whole.panel_end - whole.panel) % 2;  // tasks begin with a gate's panel
  rest.panel = whole.panel_end;
  switch (leave_of(*task.sink, *task.matrix)) {
    case Leave::kSet: Panels::template multiply<Leave::kSet>(whole); break;
    case Leave::kAdd: Panels::template multiply<Leave::kAdd>(whole); break;
    case Leave::kGated: Panels::template multiply<Leave::kGated>(whole); break;
    case Leave::kGatedBf16: Panels::template multiply<Leave::kGatedBf16>(whole); break;
    case Leave::kOther: rest.panel = task.panel;
  }
  if (rest.panel < rest.panel_end) Panels::template multiply<Leave::kOther>(rest);
}

// ---- int8 weights, two bytes an activation ----

constexpr int kByteStep = 64;  // columns of bytes in a tile

// Sums are of at most so many products of 127 and 255.
inline bool takes_i16(const Matrix& matrix) {
  return matrix.format == Format::kI8 && matrix.padded_cols % kByteStep == 0 && matrix.padded_cols < 65536;
}

template <Leave kLeave, int NB>
void i16_groups(const GemmTask& task, int& panel) {
  if (panel + NB > task.panel_end) return;
  const RowTiles rows(task);
  const Matrix& matrix = *task.matrix;
  const int steps = matrix.padded_cols / kByteStep;
  const size_t plane = task.x->stride;
  constexpr int down[2] = {0, NB * kTileRowBytes};
  Leaving<ByteSums<NB>, kLeave, NB> leaving(task);
  for (; panel + NB <= task.panel_end; panel += NB) {
    PanelsAhead ahead = panels_ahead(matrix, panel, NB, rows.count, steps);
    for (int tile = 0; tile < rows.count; ++tile) {
      const int first = rows.first(tile);
      const uint8_t* high = task.x->row(first);
      const uint8_t* x[2] = {high, high + plane};
      const PanelTiles panels{matrix.panel(panel), matrix.panel_bytes, steps};
      multiply_tiles<ByteProducts, 2, NB>(task, x, 2 * plane, panels, down, leaving, ahead);
      leaving.put(panel, first, rows.new_row(tile), first + rows.rows);
    }
  }
  leaving.drain();
}

struct I16Panels {
  template <Leave kLeave>
  static void multiply(const GemmTask& task) {
    int panel = task.panel;
    i16_groups<kLeave, 2>(task, panel);
    i16_groups<kLeave, 1>(task, panel);
  }
};

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
  if (task.x->type == Type::kBF16) return multiply_task<Bf16Panels>(task);
  if (task.x->type == Type::kI16) return multiply_task<I16Panels>(task);
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
