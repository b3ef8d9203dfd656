#include "matrix.h"

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "half.h"

namespace kllm {

namespace {

constexpr size_t kChunk = size_t(32) << 20;
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSuperHead = 64 + 8 * 32;  // of 256 columns: what precedes the lines

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Bytes of 16 rows x 32 columns.
size_t panel_block_bytes(Format format) {
  switch (format) {
    case Format::kF32: return 64 * 32;
    case Format::kBF16: return 64 * 16;
    case Format::kI8: return 64 * 8;
    case Format::kQ8_0: return 32 + 64 * 8;
    case Format::kQ4_0: return 32 + 64 * 4;
    case Format::kQ4_1: return 64 + 64 * 4;
    case Format::kQ4K: return kSuperHead / 8 + 64 * 4;
    case Format::kQ6K: return kSuperHead / 8 + 64 * 6;
  }
  throw std::invalid_argument("unknown format");
}

// The 6-bit scale and min of block 0 .. 7 from the 12 bytes of Q4_K: those of blocks 4 .. 7 have their low four bits in
// bytes 8 .. 11 and the upper two on top of the scale and the min four blocks before.
void unpack_scale(const uint8_t* packed, int block, uint8_t& scale, uint8_t& least) {
  if (block < 4) {
    scale = packed[block] & 63;
    least = packed[block + 4] & 63;
  } else {
    scale = (packed[block + 4] & 15) | (packed[block - 4] >> 6 << 4);
    least = (packed[block + 4] >> 4) | (packed[block] >> 6 << 4);
  }
}

// Low four bits of 32 numbers to the nibbles of a lane. number(k): that of column k.
template <class Number>
void put_nibbles(uint8_t* lines, int lane, Number number) {
  for (int k = 0; k < 16; ++k)
    lines[k / 4 * 64 + lane * 4 + k % 4] = (uint8_t)((number(k) & 15) | (number(k + 16) & 15) << 4);
}

int nibble(const uint8_t* lines, int lane, int column) {
  const uint8_t byte = lines[column % 16 / 4 * 64 + lane * 4 + column % 4];
  return column < 16 ? byte & 15 : byte >> 4;
}

void put_q4_k(const uint8_t* source, uint8_t* target, int lane) {
  memcpy(target + lane * 2, source, 2);
  memcpy(target + 32 + lane * 2, source + 2, 2);
  for (int block = 0; block < 8; ++block) {
    uint8_t* parts = target + 64 + 32 * block;
    unpack_scale(source + 4, block, parts[lane], parts[16 + lane]);
    const uint8_t* run = source + 16 + block / 2 * 32;
    put_nibbles(target + kSuperHead + 256 * block, lane, [&](int k) { return run[k] >> block % 2 * 4; });
  }
}

void put_q6_k(const uint8_t* source, uint8_t* target, int lane) {
  memcpy(target + lane * 2, source + 208, 2);
  for (int block = 0; block < 8; ++block) {
    for (int half = 0; half < 2; ++half) target[64 + 32 * block + 16 * half + lane] = source[192 + 2 * block + half];
    const uint8_t* low = source + block / 4 * 64 + block % 2 * 32;
    const uint8_t* high = source + 128 + block / 4 * 32;
    uint8_t* lines = target + kSuperHead + 384 * block;
    put_nibbles(lines, lane, [&](int k) { return low[k] >> block % 4 / 2 * 4; });
    for (int k = 0; k < 8; ++k) {  // four groups share a byte: columns first, first + 4, + 8, + 12
      const int first = k / 4 * 16 + k % 4;
      int byte = 0;
      for (int field = 0; field < 4; ++field) byte |= (high[first + 4 * field] >> block % 4 * 2 & 3) << 2 * field;
      lines[256 + k / 4 * 64 + lane * 4 + k % 4] = (uint8_t)byte;
    }
  }
}

float q4_k_value(const uint8_t* super, int lane, int column) {
  const int block = column / 32;
  const uint8_t* parts = super + 64 + 32 * block;
  const float scale = from_half(((const uint16_t*)super)[lane]) * parts[lane];
  const float least = from_half(((const uint16_t*)super)[16 + lane]) * parts[16 + lane];
  return scale * nibble(super + kSuperHead + 256 * block, lane, column % 32) - least;
}

float q6_k_value(const uint8_t* super, int lane, int column) {
  const int block = column / 32, k = column % 32;
  const uint8_t* lines = super + kSuperHead + 384 * block;
  const int high = lines[256 + k / 16 * 64 + lane * 4 + k % 4] >> k / 4 % 4 * 2 & 3;
  const float scale = from_half(((const uint16_t*)super)[lane]) * (int8_t)super[64 + 32 * block + k / 16 * 16 + lane];
  return scale * ((nibble(lines, lane, k) | high << 4) - 32);
}

}  // namespace

Arena::~Arena() {
  for (auto& chunk : chunks_) munmap(chunk.data, chunk.size);
}

uint8_t* Arena::take(size_t bytes) {
  std::lock_guard lock(mutex_);
  bytes = round_up(bytes, 64);
  if (chunks_.empty() || used_ + bytes > chunks_.back().size) {
    size_t size = round_up(bytes > kChunk ? bytes : kChunk, kHugePage);
    void* data = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    size_t lead = round_up((size_t)data, kHugePage) - (size_t)data;
    if (lead) munmap(data, lead);
    if (lead < kHugePage) munmap((uint8_t*)data + lead + size, kHugePage - lead);
    data = (uint8_t*)data + lead;
    madvise(data, size, MADV_HUGEPAGE);
    chunks_.push_back({(uint8_t*)data, size});
    used_ = 0;
  }
  uint8_t* place = chunks_.back().data + used_;
  used_ += bytes;
  taken_ += bytes;
  return place;
}

Matrix::Matrix(std::shared_ptr<Arena> arena_, Format format_, int rows_, int cols_, bool gated_)
    : format(format_), rows(rows_), cols(cols_), gated(gated_), row_scales(nullptr), arena(std::move(arena_)) {
  if (rows < 1 || cols < 1 || (gated && rows % 2)) throw std::invalid_argument("a matrix needs rows and columns");
  if (block_columns(format) > kBlock && cols % block_columns(format))
    throw std::invalid_argument(std::string(name_of(format)) + " needs a multiple of 256 columns");
  padded_cols = (int)round_up(cols, kBlock);
  int half = gated ? rows / 2 : rows;
  panels = (int)round_up(half, kPanelRows) / kPanelRows * (gated ? 2 : 1);
  panel_bytes = panel_block_bytes(format) * (padded_cols / kBlock);
  data = arena->take(panel_bytes * panels);
  if (format == Format::kI8) {
    row_scales = (float*)arena->take(sizeof(float) * panels * kPanelRows);
    memset(data, 128, panel_bytes * panels);  // a byte holds q + 128, so this is zero
  }
  if (format == Format::kQ8_0) {
    for (size_t at = 0; at < panel_bytes * panels; at += panel_block_bytes(format)) memset(data + at + 32, 128, 512);
  }
}

Matrix::Place Matrix::place(int row) const {
  if (!gated) return {row / kPanelRows, row % kPanelRows};
  int half = rows / 2, within = row % half;
  return {within / kPanelRows * 2 + row / half, within % kPanelRows};
}

void Matrix::fill(int first, int count, const float* values) {
  for (int i = 0; i < count; ++i) {
    const float* source = values + (size_t)i * cols;
    auto [index, lane] = place(first + i);
    uint8_t* target = data + panel_bytes * index;
    if (format == Format::kF32) {
      for (int k = 0; k < cols; ++k) ((float*)target)[(size_t)k * 16 + lane] = source[k];
    } else if (format == Format::kBF16) {
      for (int k = 0; k < cols; ++k) ((uint16_t*)target)[(size_t)(k / 2) * 32 + lane * 2 + k % 2] = to_bf16(source[k]);
    } else if (format == Format::kI8) {
      float most = 0;
      for (int k = 0; k < cols; ++k) most = std::fmax(most, std::fabs(source[k]));
      float scale = most / 127, inverse = most > 0 ? 127 / most : 0;
      row_scales[index * kPanelRows + lane] = scale;
      for (int k = 0; k < cols; ++k)
        target[(size_t)(k / 4) * 64 + lane * 4 + k % 4] = (uint8_t)(128 + (int)std::nearbyint(source[k] * inverse));
    } else {
      throw std::invalid_argument(std::string(name_of(format)) + " is filled with blocks");
    }
  }
}

void Matrix::fill_bf16(int first, int count, const uint16_t* values) {
  if (format == Format::kBF16) {
    for (int i = 0; i < count; ++i) {
      const uint16_t* source = values + (size_t)i * cols;
      auto [index, lane] = place(first + i);
      uint16_t* target = (uint16_t*)(data + panel_bytes * index) + lane * 2;
      int k = 0;
      for (; k + 1 < cols; k += 2) memcpy(target + (size_t)k * 16, source + k, 4);
      if (k < cols) target[(size_t)k * 16] = source[k];
    }
    return;
  }
  std::vector<float> row(cols);
  for (int i = 0; i < count; ++i) {
    for (int k = 0; k < cols; ++k) row[k] = from_bf16(values[(size_t)i * cols + k]);
    fill(first + i, 1, row.data());
  }
}

void Matrix::fill_int8(int first, int count, const int8_t* values, const float* scales) {
  if (format != Format::kI8) throw std::invalid_argument(std::string(name_of(format)) + " is not filled with int8");
  for (int i = 0; i < count; ++i) {
    const int8_t* source = values + (size_t)i * cols;
    auto [index, lane] = place(first + i);
    uint8_t* target = data + panel_bytes * index;
    row_scales[index * kPanelRows + lane] = scales[i];
    for (int k = 0; k < cols; ++k) target[(size_t)(k / 4) * 64 + lane * 4 + k % 4] = (uint8_t)(source[k] + 128);
  }
}

void Matrix::fill_blocks(int first, int count, const uint8_t* blocks) {
  const int columns = block_columns(format), per_row = cols / columns;
  if (cols % columns) throw std::invalid_argument("rows of blocks are multiples of 32");
  const size_t source_size = block_bytes(format), target_size = panel_block_bytes(format) * (columns / kBlock);
  const int scales = format == Format::kQ4_1 ? 2 : 1;  // d, or d and m
  for (int i = 0; i < count; ++i) {
    auto [index, lane] = place(first + i);
    for (int b = 0; b < per_row; ++b) {
      const uint8_t* source = blocks + ((size_t)i * per_row + b) * source_size;
      uint8_t* target = data + panel_bytes * index + target_size * b;
      if (format == Format::kQ4K || format == Format::kQ6K) {
        format == Format::kQ4K ? put_q4_k(source, target, lane) : put_q6_k(source, target, lane);
        continue;
      }
      for (int s = 0; s < scales; ++s) memcpy(target + s * 32 + lane * 2, source + s * 2, 2);
      source += scales * 2;
      target += scales * 32;
      if (format == Format::kQ8_0) {
        for (int k = 0; k < 32; ++k) target[k / 4 * 64 + lane * 4 + k % 4] = (uint8_t)(source[k] ^ 0x80);  // q + 128
      } else {
        for (int group = 0; group < 4; ++group) memcpy(target + group * 64 + lane * 4, source + group * 4, 4);
      }
    }
  }
}

void Matrix::read_row(int row, float* out) const {
  auto [index, lane] = place(row);
  const uint8_t* source = panel(index);
  for (int k = 0; k < cols; ++k) {
    const uint8_t* block = source + panel_block_bytes(format) * (k / kBlock);
    const int in_block = k % kBlock;
    switch (format) {
      case Format::kF32: out[k] = ((const float*)source)[(size_t)k * 16 + lane]; break;
      case Format::kBF16: out[k] = from_bf16(((const uint16_t*)source)[(size_t)(k / 2) * 32 + lane * 2 + k % 2]); break;
      case Format::kI8:
        out[k] = row_scales[index * kPanelRows + lane] * (source[(size_t)(k / 4) * 64 + lane * 4 + k % 4] - 128);
        break;
      case Format::kQ8_0:
        out[k] = from_half(((const uint16_t*)block)[lane]) * (block[32 + in_block / 4 * 64 + lane * 4 + in_block % 4] - 128);
        break;
      case Format::kQ4_0:
      case Format::kQ4_1: {
        const int q = nibble(block + (format == Format::kQ4_1 ? 64 : 32), lane, in_block);
        const float d = from_half(((const uint16_t*)block)[lane]);
        out[k] = format == Format::kQ4_1 ? d * q + from_half(((const uint16_t*)block)[16 + lane]) : d * (q - 8);
        break;
      }
      case Format::kQ4K: out[k] = q4_k_value(source + panel_block_bytes(format) * (k / 256 * 8), lane, k % 256); break;
      case Format::kQ6K: out[k] = q6_k_value(source + panel_block_bytes(format) * (k / 256 * 8), lane, k % 256); break;
    }
  }
}

const char* name_of(Format format) {
  static const char* const names[] = {"float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k"};
  return names[(int)format];
}

Format format_named(const char* name) {
  for (int i = 0; i <= (int)Format::kQ6K; ++i)
    if (!strcmp(name, name_of((Format)i))) return (Format)i;
  throw std::invalid_argument(std::string("unknown weight format ") + name);
}

size_t block_bytes(Format format) {
  switch (format) {
    case Format::kQ8_0: return 34;
    case Format::kQ4_0: return 18;
    case Format::kQ4_1: return 20;
    case Format::kQ4K: return 144;
    case Format::kQ6K: return 210;
    default: throw std::invalid_argument(std::string(name_of(format)) + " has no blocks");
  }
}

int block_columns(Format format) { return format == Format::kQ4K || format == Format::kQ6K ? 256 : kBlock; }

}  // namespace kllm
