#include "product.h"

#include <algorithm>

#include "machine.h"

namespace kllm {

namespace {

constexpr int kLeastTasks = 3;        // a thread, to even out a disturbed one
constexpr int kPanelChunk = 8;        // panels a task takes from many rows: a multiple of the widest micro tiles
constexpr int kSerialFloats = 8192;   // work below this is done by the caller

int divide_up(int n, int unit) { return (n + unit - 1) / unit; }

// Panels a task takes where one chunk of rows is all there is: of the sizes that leave every thread some tasks, the one
// with which the last thread is done first. Micro tiles are 6 panels wide for few rows, else 4 and 2.
int panels_of_task(int panels, int rows, int threads) {
  const int unit = rows <= 4 ? 6 : 2, least = rows <= 4 ? 6 : 4;
  const int most = std::max(least, panels / (threads * kLeastTasks));
  int best = least, best_end = panels;
  for (int size = least; size <= most; size += unit) {
    const int end = divide_up(divide_up(panels, size), threads) * size;
    if (end < best_end) best = size, best_end = end;
  }
  return best;
}

}  // namespace

const Activations& ActivationBuffer::shape(Type type, int rows, int cols) {
  const int stride = divide_up(cols, kBlock) * kBlock;
  view_ = {type, rows, cols, stride, data_.get((size_t)rows * stride * size_of(type)), nullptr, nullptr};
  if (type == Type::kI8) {
    view_.scales = scales_.of<float>((size_t)rows * (stride / kBlock));
    view_.sums = sums_.of<int32_t>((size_t)rows * (stride / kBlock));
  } else if (type == Type::kI16) {
    view_.scales = scales_.of<float>(rows);
    view_.sums = sums_.of<int32_t>((size_t)rows * 2);
  }
  return view_;
}

void Scratch::reserve(int threads, size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes < bytes_) bytes = bytes_;
  data_ = buffer_.get(bytes * threads);
  bytes_ = bytes;
}

size_t product_scratch(const Matrix& matrix) {
  constexpr int kWidest = 6;
  const bool dequantised = matrix.format != Format::kF32 && matrix.format != Format::kBF16;
  return dequantised ? (size_t)kWidest * matrix.padded_cols * kPanelRows * sizeof(float) : 0;
}

Type activation_type(const Matrix& matrix, Type wanted) {
  const auto takes_i16 = kernels().takes_i16;
  return wanted == Type::kI8 && takes_i16 && takes_i16(matrix) ? Type::kI16 : wanted;
}

void prepare(const float* x, size_t stride, const float* norm, float eps, const Activations& out) {
  const int chunk = std::max(1, kSerialFloats / out.stride);
  pool().run(divide_up(out.rows, chunk), [&](int task, int) {
    const int row = task * chunk;
    kernels().prepare(x, stride, norm, eps, out, row, std::min(row + chunk, out.rows));
  });
}

void multiply(const Matrix& matrix, const Activations& x, const Sink& sink, const Scratch& scratch) {
  const int row_chunks = divide_up(x.rows, kernels().row_chunk);
  const int unit = kernels().row_unit;
  const int row_chunk = row_chunks > 1 ? divide_up(divide_up(x.rows, row_chunks), unit) * unit : x.rows;
  const int panel_chunk = row_chunks > 1 ? kPanelChunk : panels_of_task(matrix.panels, x.rows, pool().threads());
  const int panel_chunks = divide_up(matrix.panels, panel_chunk);
  pool().run(row_chunks * panel_chunks, [&](int task, int thread) {
    const int row = task / panel_chunks * row_chunk, panel = task % panel_chunks * panel_chunk;
    GemmTask gemm{&matrix, &x, &sink, row, std::min(row + row_chunk, x.rows),
                  panel,   std::min(panel + panel_chunk, matrix.panels), scratch.slice(thread), scratch.bytes()};
    kernels().gemm(gemm);
  });
}

}  // namespace kllm
