// Weights of a linear map, laid out once so that a kernel reads memory front to back.
//
// A matrix [rows, cols] (rows are outputs) is cut into panels of 16 rows. Within a panel the 16 rows lie side by side,
// one 64-byte line after the other along cols; the same bytes serve AVX2, AVX-512 and, as B tiles, AMX:
//
//   F32    line = 16 floats                        of column k
//   BF16   line = 16 pairs of bfloat16             of columns 2 i, 2 i + 1
//   I8     line = 16 groups of 4 bytes (q + 128)   of columns 4 i .. 4 i + 3; one float32 scale a row, kept apart
//   Q8_0   32 columns: 16 fp16 d        | 8 lines as I8
//   Q4_0   32 columns: 16 fp16 d        | 4 lines; line j holds groups j (low nibbles) and j + 4 (high nibbles)
//   Q4_1   32 columns: 16 fp16 d, 16 m  | 4 lines as Q4_0
//   Q4_K   256 columns: 16 fp16 d, 16 m | 8 x (16 bytes scale, 16 min) | 8 x (4 lines as Q4_0)
//   Q6_K   256 columns: 16 fp16 d, pad  | 8 x (2 x 16 signed scales, of 16 columns each) | 8 x (4 lines as Q4_0: low four
//          bits, 2 lines: bits 2 i, 2 i + 1 of a byte of the first are the high two of group i, of the second i + 4)
//
// Values are those of the checkpoint, bit for bit; only their order differs (the 6-bit scales of Q4_K take a byte). Columns are padded with zeros to a whole
// block, rows to a whole panel. A gated matrix holds gate rows then up rows, and its panels alternate between the two,
// so that one kernel call has both halves of silu(gate) * up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace kllm {

enum class Format { kF32, kBF16, kI8, kQ8_0, kQ4_0, kQ4_1, kQ4K, kQ6K };

constexpr int kPanelRows = 16;
constexpr int kBlock = 32;  // columns of a block of the quantised formats, and of a group of int8 activations

// Memory for many matrices: few large mappings, on huge pages where the system has them (streaming hundreds of
// megabytes a step, page walks show). Freed as a whole when the last matrix that uses it goes.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  uint8_t* take(size_t bytes);  // zeroed, aligned to 64 bytes; throws std::bad_alloc
  size_t bytes() const { return taken_; }

 private:
  struct Chunk {
    uint8_t* data;
    size_t size;
  };
  std::mutex mutex_;
  std::vector<Chunk> chunks_;
  size_t used_ = 0, taken_ = 0;
};

struct Matrix {
  Format format;
  int rows, cols;
  int padded_cols;     // a whole number of blocks
  int panels;
  bool gated;          // gate and up panels alternate
  size_t panel_bytes;
  uint8_t* data;
  float* row_scales;   // I8: [panels * 16], in panel order
  std::shared_ptr<Arena> arena;

  Matrix(std::shared_ptr<Arena> arena, Format format, int rows, int cols, bool gated);

  const uint8_t* panel(int index) const { return data + panel_bytes * index; }
  // The logical rows [first, first + count) that a panel holds.
  int first_row(int panel) const { return gated ? (panel & 1) * (rows / 2) + panel / 2 * kPanelRows : panel * kPanelRows; }
  int row_count(int panel) const {
    const int left = gated ? rows / 2 - panel / 2 * kPanelRows : rows - panel * kPanelRows;
    return left < kPanelRows ? left : kPanelRows;
  }

  // rows [first, first + count) from row-major floats. F32: kept; BF16: rounded; I8: rounded to |max| / 127 a row.
  void fill(int first, int count, const float* values);
  void fill_bf16(int first, int count, const uint16_t* values);  // BF16 and F32
  // The same from the blocks of a GGUF tensor of this very format.
  void fill_blocks(int first, int count, const uint8_t* blocks);
  // I8 from int8 values [count, cols] and their scales [count].
  void fill_int8(int first, int count, const int8_t* values, const float* scales);
  // One row as floats.
  void read_row(int row, float* out) const;

 private:
  struct Place { int panel, lane; };
  Place place(int row) const;
};

const char* name_of(Format format);
Format format_named(const char* name);      // throws std::invalid_argument
size_t block_bytes(Format format);          // GGUF bytes of one block
int block_columns(Format format);           // columns of such a block: 32, of Q4_K and Q6_K 256

}  // namespace kllm
