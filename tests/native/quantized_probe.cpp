// The quantised products as plain C functions, for ctypes. Built once per instruction set, with KLLM_ISA defined.
#include <ctime>
#include <memory>
#include <stdexcept>

#include "dequantize.h"
#include "gemm_quantized.h"
#include "prepare.h"

using namespace kllm;

namespace {

struct Weights {
  std::shared_ptr<Arena> arena = std::make_shared<Arena>();
  std::unique_ptr<Matrix> matrix;
};

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

}  // namespace

extern "C" {

void* weights_new(const char* format, int rows, int cols, int gated) try {
  auto weights = std::make_unique<Weights>();
  weights->matrix = std::make_unique<Matrix>(weights->arena, format_named(format), rows, cols, gated != 0);
  return weights.release();
} catch (const std::exception&) {
  return nullptr;
}

void weights_free(void* weights) { delete (Weights*)weights; }
void weights_fill(void* weights, int first, int count, const float* values) {
  ((Weights*)weights)->matrix->fill(first, count, values);
}
void weights_fill_blocks(void* weights, int first, int count, const uint8_t* blocks) {
  ((Weights*)weights)->matrix->fill_blocks(first, count, blocks);
}
void weights_read_row(void* weights, int row, float* out) { ((Weights*)weights)->matrix->read_row(row, out); }
int weights_panels(void* weights) { return ((Weights*)weights)->matrix->panels; }
int weights_first_row(void* weights, int panel) { return ((Weights*)weights)->matrix->first_row(panel); }
int weights_row_count(void* weights, int panel) { return ((Weights*)weights)->matrix->row_count(panel); }
size_t weights_bytes(void* weights) {
  const Matrix& matrix = *((Weights*)weights)->matrix;
  return matrix.panel_bytes * matrix.panels;
}
void weights_dequantize(void* weights, int panel, float* out, uint16_t* bf16) {
  const Matrix& matrix = *((Weights*)weights)->matrix;
  KLLM_ISA::dequantize_panel(matrix, panel, out);
  KLLM_ISA::dequantize_panel_bf16(matrix, panel, bf16);
}

void prepare(const float* x, size_t x_stride, const float* norm, float eps, int type, int rows, int cols, int stride,
             void* data, float* scales, int32_t* sums) {
  const Activations out{(Type)type, rows, cols, stride, data, scales, sums};
  KLLM_ISA::prepare(x, x_stride, norm, eps, out, 0, rows);
}

// One task: rows [row, row_end) x panels [panel, panel_end), `repeat` times. Returns processor seconds of one.
double gemm(void* weights, int rows, int stride, void* data, float* scales, int32_t* sums, int store, int type, void* y,
            size_t y_stride, const float* bias, int row, int row_end, int panel, int panel_end, int repeat) {
  const Matrix& matrix = *((Weights*)weights)->matrix;
  const Activations x{Type::kI8, rows, matrix.cols, stride, data, scales, sums};
  const Sink sink{(Store)store, (Type)type, y, y_stride, bias};
  const GemmTask task{&matrix, &x, &sink, row, row_end, panel, panel_end, nullptr, 0};
  const double start = thread_seconds();
  for (int i = 0; i < repeat; ++i) KLLM_ISA::gemm_int8(task);
  return (thread_seconds() - start) / repeat;
}

}  // extern "C"
