// Reading packed weights: the lines and scales of 32 columns of a panel, for any quantised format of matrix.h.
#pragma once

#include "matrix.h"
#include "simd.h"

namespace kllm::KLLM_ISA {

constexpr bool is_super(Format format) { return format == Format::kQ4K || format == Format::kQ6K; }
constexpr bool has_nibbles(Format format) {
  return format == Format::kQ4_0 || format == Format::kQ4_1 || format == Format::kQ4K;
}
constexpr bool has_least(Format format) { return format == Format::kQ4_1 || format == Format::kQ4K; }

// What is subtracted from a stored number.
constexpr int offset_of(Format format) {
  switch (format) {
    case Format::kI8:
    case Format::kQ8_0: return 128;
    case Format::kQ4_0: return 8;
    case Format::kQ6K: return 32;
    default: return 0;
  }
}

// Bytes of the lines of 32 columns, and of what precedes them: fp16 scales, of a super-block also bytes of its blocks.
constexpr size_t line_bytes(Format format) {
  return format == Format::kI8 || format == Format::kQ8_0 ? 512 : format == Format::kQ6K ? 384 : 256;
}
constexpr size_t head_bytes(Format format) {
  return is_super(format) ? 64 + 8 * 32 : format == Format::kI8 ? 0 : format == Format::kQ4_1 ? 64 : 32;
}

KLLM_INLINE vw repeat_word(int32_t value) { return wset32(&value); }
KLLM_INLINE vw repeat_byte(int value) { return repeat_word(value * 0x01010101); }

#if defined(__AVX512F__)
KLLM_INLINE vw operator|(vw a, vw b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int Bits>
KLLM_INLINE vw shift_right(vw a) { return {_mm512_srli_epi32(a.v, Bits)}; }
template <int Bits>
KLLM_INLINE vw shift_left(vw a) { return {_mm512_slli_epi32(a.v, Bits)}; }
KLLM_INLINE vw operator&(vw a, vw b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int Byte>
KLLM_INLINE vi byte_of(vw a) { return {_mm512_and_si512(_mm512_srli_epi32(a.v, 8 * Byte), _mm512_set1_epi32(255))}; }
KLLM_INLINE vw bits_of(vf a) { return {_mm512_castps_si512(a.v)}; }
KLLM_INLINE vw add_words(vw a, vw b) { return {_mm512_add_epi32(a.v, b.v)}; }
#else
KLLM_INLINE vw operator|(vw x, vw y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
KLLM_INLINE vw operator&(vw x, vw y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
template <int Bits>
KLLM_INLINE vw shift_right(vw x) { return {_mm256_srli_epi32(x.a, Bits), _mm256_srli_epi32(x.b, Bits)}; }
template <int Bits>
KLLM_INLINE vw shift_left(vw x) { return {_mm256_slli_epi32(x.a, Bits), _mm256_slli_epi32(x.b, Bits)}; }
template <int Byte>
KLLM_INLINE vi byte_of(vw x) {
  const __m256i mask = _mm256_set1_epi32(255);
  return {_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * Byte), mask), _mm256_and_si256(_mm256_srli_epi32(x.b, 8 * Byte), mask)};
}
KLLM_INLINE vw bits_of(vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
KLLM_INLINE vw add_words(vw x, vw y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
#endif

// Lines of one block of 32 columns, as unsigned bytes: line j and line j + 4 come from the same memory where they are
// packed, so they are read together.
template <Format F, int J>
KLLM_INLINE void read_lines(const uint8_t* lines, vw& low, vw& high) {
  const vw line = wload(lines + 64 * J);
  if constexpr (line_bytes(F) == 512) {
    low = line;
    high = wload(lines + 64 * (J + 4));
  } else {
    low = low_nibbles(line);
    high = high_nibbles(line);
  }
  if constexpr (F == Format::kQ6K) {  // two more bits of groups 0 .. 3 and 4 .. 7 in the fields of two further lines
    const vw field = repeat_byte(3 << 4);
    const vw first = wload(lines + 256), second = wload(lines + 320);
    if constexpr (J < 2) {
      low = low | (shift_left<4 - 2 * J>(first) & field);
      high = high | (shift_left<4 - 2 * J>(second) & field);
    } else {
      low = low | (shift_right<2 * J - 4>(first) & field);
      high = high | (shift_right<2 * J - 4>(second) & field);
    }
  }
}

// One panel, walked block by block.
template <Format F>
struct PanelReader {
  const uint8_t* panel;

  static constexpr size_t kBytes = is_super(F) ? head_bytes(F) + 8 * line_bytes(F) : head_bytes(F) + line_bytes(F);

  KLLM_INLINE const uint8_t* head(int block) const { return panel + kBytes * (is_super(F) ? block / 8 : block); }
  KLLM_INLINE const uint8_t* lines(int block) const {
    return head(block) + head_bytes(F) + (is_super(F) ? line_bytes(F) * (block % 8) : 0);
  }
  // Of a super-block: the 32 bytes that belong to this block.
  KLLM_INLINE const uint8_t* parts(int block) const { return head(block) + 64 + 32 * (block % 8); }

  // What numbers are multiplied with; of Q6_K without the scale of the 16 columns.
  KLLM_INLINE vf scale(int block) const {
    const vf d = load_f16((const uint16_t*)head(block));
    return F == Format::kQ4K ? d * to_float(load_u8(parts(block))) : d;
  }
  // Q4_1: what is added to a weight. Q4_K: what is taken from it.
  KLLM_INLINE vf least(int block) const {
    const vf m = load_f16((const uint16_t*)head(block) + kPanelRows);
    return F == Format::kQ4K ? m * to_float(load_u8(parts(block) + kPanelRows)) : m;
  }
  // Q6_K: the scale of columns 0 .. 15 or 16 .. 31.
  KLLM_INLINE vi half_scale(int block, int half) const { return load_i8((const int8_t*)parts(block) + kPanelRows * half); }
};

}  // namespace kllm::KLLM_ISA
