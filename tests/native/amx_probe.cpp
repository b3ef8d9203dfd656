// The products of AMX beside everything of quantized_probe.cpp. Built for AVX-512 with BF16, over emulated tiles, or for AMX.
#if !defined(__AMX_TILE__)
#define KLLM_EMULATED_TILES
#endif
#include <string>

#include "gemm_amx.h"
#include "product.h"
#include "quantized_probe.cpp"
#include "tile_check.h"

namespace {

void gemm_plain(const GemmTask& task) {
  switch (task.x->type) {
    case Type::kF32: return KLLM_ISA::gemm_float<false>(task);
    case Type::kBF16: return KLLM_ISA::gemm_float<true>(task);
    case Type::kI8: return KLLM_ISA::gemm_int8(task);
    case Type::kI16: return;
  }
}

// The last result of a product of many rows is off by a little.
void gemm_wrong(const GemmTask& task) {
  KLLM_ISA::gemm_tiles(task);
  if (task.row_end > 1) ((float*)task.sink->y)[task.row_end * task.sink->stride - 1] += 1;
}

void gemm_illegal(const GemmTask&) { asm volatile("ud2"); }

void gemm_endless(const GemmTask&) {
  for (;;) asm volatile("pause");
}

Kernels with_gemm(void (*gemm)(const GemmTask&)) {
  Kernels table{};
  table.gemm = gemm;
  return table;
}

}  // namespace

extern "C" {

bool may_use_tiles() { return processor_has_tiles(); }

// sums [rows, 16] += a [rows, 4 * groups bytes] x b [groups, 16 columns, 4 bytes], by one instruction.
void dot_tiles(int bf16, int rows, int groups, void* sums, const void* a, const void* b) {
  KLLM_ISA::TileConfig config;
  config.set(0, rows, 64);
  config.set(1, rows, 4 * groups);
  config.set(2, groups, 64);
  KLLM_ISA::configure_tiles(config);
  KLLM_ISA::load_tile<0>(sums, 64);
  KLLM_ISA::load_tile<1>(a, 4 * groups);
  KLLM_ISA::load_tile<2>(b, 64);
  bf16 ? KLLM_ISA::tile_dot_bf16<0, 1, 2>() : KLLM_ISA::tile_dot_s8u8<0, 1, 2>();
  KLLM_ISA::store_tile<0>(sums, 64);
  KLLM_ISA::release_tiles();
}

// One task of any type of activations, with tiles or without.
void multiply(int tiles, void* weights, int x_type, int rows, int stride, void* data, float* scales, int32_t* sums, int store,
              int type, void* y, size_t y_stride, const float* bias, int row, int row_end, int panel, int panel_end) {
  const Matrix& matrix = *((Weights*)weights)->matrix;
  const Activations x{(Type)x_type, rows, matrix.cols, stride, data, scales, sums};
  const Sink sink{(Store)store, (Type)type, y, y_stride, bias};
  Buffer scratch;
  const size_t bytes = (size_t)6 * matrix.padded_cols * kPanelRows * sizeof(float);
  const GemmTask task{&matrix, &x, &sink, row, row_end, panel, panel_end, scratch.get(bytes), bytes};
  tiles ? KLLM_ISA::gemm_tiles(task) : gemm_plain(task);
}

// What the check at start says of a table with such a gemm.
int check(const char* kind) {
  const std::string name = kind;
  const Kernels table = with_gemm(name == "right" ? KLLM_ISA::gemm_tiles : name == "wrong" ? gemm_wrong :
                                  name == "illegal" ? gemm_illegal : gemm_endless);
  return products_agree(table, with_gemm(gemm_plain), name == "endless" ? 1 : 10);
}

}  // extern "C"
