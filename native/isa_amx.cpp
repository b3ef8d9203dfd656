#define KLLM_ISA amx
#include "isa.h"

#include "gemm_amx.h"

namespace kllm {

namespace {

constexpr Kernels with_tiles(Kernels table) {
  table.gemm = amx::gemm_tiles;
  table.takes_i16 = amx::takes_i16;
  table.row_chunk = 256;
  table.row_unit = 16;  // a tile
  table.query_chunk = 128;  // a tile of keys is transposed for each
  return table;
}

}  // namespace

extern constinit const Kernels kAmxKernels = with_tiles(KLLM_TABLE("amx"));

}  // namespace kllm
