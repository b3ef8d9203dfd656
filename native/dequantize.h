// Panels of weights as floats, for products with float activations. Each value has the bits that Matrix::read_row gives.
#pragma once

#include "blocks.h"
#include "matrix.h"
#include "simd.h"

namespace kllm::KLLM_ISA {

// Two columns as pairs of bfloat16, nearest with ties to even.
KLLM_INLINE vw pairs_of_bf16(vf even, vf odd) {
  auto rounded = [](vf value) {
    const vw bits = bits_of(value), odd_bit = shift_right<16>(bits) & repeat_word(1);
    return add_words(bits, add_words(odd_bit, repeat_word(0x7fff)));
  };
  return shift_right<16>(rounded(even)) | shift_left<16>(shift_right<16>(rounded(odd)));
}

struct FloatPanel {
  float* out;
  KLLM_INLINE void put(int column, const vf* four) const {
    for (int c = 0; c < 4; ++c) store(out + (size_t)(column + c) * kPanelRows, four[c]);
  }
};

struct Bf16Panel {
  uint16_t* out;
  KLLM_INLINE void put(int column, const vf* four) const {
    for (int c = 0; c < 4; c += 2) wstore(out + (size_t)(column + c) * kPanelRows, pairs_of_bf16(four[c], four[c + 1]));
  }
};

// The four columns of one line: (q - offset) * scale, + or - least.
template <Format F>
KLLM_INLINE void decode_line(vw line, vf scale, vf least, vf* four) {
  const vi bytes[4] = {byte_of<0>(line), byte_of<1>(line), byte_of<2>(line), byte_of<3>(line)};
  for (int c = 0; c < 4; ++c) {
    const vf product = to_float(offset_of(F) ? bytes[c] - iset1(offset_of(F)) : bytes[c]) * scale;
    four[c] = F == Format::kQ4_1 ? product + least : F == Format::kQ4K ? product - least : product;
  }
}

template <Format F, int J, class Out>
KLLM_INLINE void decode_lines(const uint8_t* lines, int block, const vf* scales, vf least, const Out& out) {
  vw low, high;
  vf four[4];
  read_lines<F, J>(lines, low, high);
  decode_line<F>(low, scales[0], least, four);
  out.put(block * kBlock + 4 * J, four);
  decode_line<F>(high, scales[1], least, four);
  out.put(block * kBlock + 16 + 4 * J, four);
}

template <Format F, class Out>
void decode_panel(const Matrix& matrix, int panel, const Out& out) {
  const PanelReader<F> reader{matrix.panel(panel)};
  for (int block = 0; block < matrix.padded_cols / kBlock; ++block) {
    const vf scale = F == Format::kI8 ? load(matrix.row_scales + panel * kPanelRows) : reader.scale(block);
    const vf least = has_least(F) ? reader.least(block) : zero();
    vf scales[2] = {scale, scale};
    if constexpr (F == Format::kQ6K)
      for (int half = 0; half < 2; ++half) scales[half] = scale * to_float(reader.half_scale(block, half));
    const uint8_t* lines = reader.lines(block);
    decode_lines<F, 0>(lines, block, scales, least, out);
    decode_lines<F, 1>(lines, block, scales, least, out);
    decode_lines<F, 2>(lines, block, scales, least, out);
    decode_lines<F, 3>(lines, block, scales, least, out);
  }
}

template <class Out>
void decode_float_panel(const Matrix& matrix, int panel, const Out& out) {
  const uint8_t* line = matrix.panel(panel);
  const bool wide = matrix.format == Format::kF32;
  for (int column = 0; column < matrix.padded_cols; column += 4) {
    vf four[4];
    if (wide) {
      for (int c = 0; c < 4; ++c, line += 64) four[c] = load((const float*)line);
    } else {
      for (int c = 0; c < 4; c += 2, line += 64) {
        four[c] = even_bf16(wload(line));
        four[c + 1] = odd_bf16(wload(line));
      }
    }
    out.put(column, four);
  }
}

template <class Out>
void decode(const Matrix& matrix, int panel, const Out& out) {
  switch (matrix.format) {
    case Format::kF32:
    case Format::kBF16: return decode_float_panel(matrix, panel, out);
    case Format::kI8: return decode_panel<Format::kI8>(matrix, panel, out);
    case Format::kQ8_0: return decode_panel<Format::kQ8_0>(matrix, panel, out);
    case Format::kQ4_0: return decode_panel<Format::kQ4_0>(matrix, panel, out);
    case Format::kQ4_1: return decode_panel<Format::kQ4_1>(matrix, panel, out);
    case Format::kQ4K: return decode_panel<Format::kQ4K>(matrix, panel, out);
    case Format::kQ6K: return decode_panel<Format::kQ6K>(matrix, panel, out);
  }
}

// out: [padded_cols][16]
inline void dequantize_panel(const Matrix& matrix, int panel, float* out) { decode(matrix, panel, FloatPanel{out}); }

// out: [padded_cols / 2][16][2], bfloat16
inline void dequantize_panel_bf16(const Matrix& matrix, int panel, uint16_t* out) { decode(matrix, panel, Bf16Panel{out}); }

}  // namespace kllm::KLLM_ISA
