// Rearrangements of lanes that attention needs: transposition of 32-bit words, interleaving, selection.
#pragma once

#include "simd.h"

namespace kllm::KLLM_ISA {

#if defined(__AVX512F__)

// Four pieces of 16 bytes, side by side.
KLLM_INLINE vw join4(const void* a, const void* b, const void* c, const void* d) {
  __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)a));
  x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)b), 1);
  x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)c), 2);
  return {_mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)d), 3)};
}

// Transposes 4 x 4 words of 32 bits in each of the four pieces of 16 bytes: word j of a .. d becomes the j-th argument.
KLLM_INLINE void transpose4(vw& a, vw& b, vw& c, vw& d) {
  __m512i ab = _mm512_unpacklo_epi32(a.v, b.v), ab2 = _mm512_unpackhi_epi32(a.v, b.v);
  __m512i cd = _mm512_unpacklo_epi32(c.v, d.v), cd2 = _mm512_unpackhi_epi32(c.v, d.v);
  a.v = _mm512_unpacklo_epi64(ab, cd);
  b.v = _mm512_unpackhi_epi64(ab, cd);
  c.v = _mm512_unpacklo_epi64(ab2, cd2);
  d.v = _mm512_unpackhi_epi64(ab2, cd2);
}

KLLM_INLINE vf as_floats(vw a) { return {_mm512_castsi512_ps(a.v)}; }

// Lanes below n (of any value) from a, the others from b.
KLLM_INLINE vf first_n(vf a, int n, vf b) {
  unsigned mask = n >= kLanes ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1;
  return {_mm512_mask_blend_ps((__mmask16)mask, b.v, a.v)};
}

// The four bytes of every 32-bit word as signed numbers; index 0 .. 3.
template <int kIndex>
KLLM_INLINE vf signed_byte(vw a) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a.v, 24 - 8 * kIndex), 24))};
}

// a rounded to bfloat16, kept as floats.
KLLM_INLINE vf round_bf16(vf a) {
#if defined(__AVX512BF16__)
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.v)), 16))};
#else
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000)))};
#endif
}

// 16-bit elements a0 b0 a1 b1 ..: `low` from the first 16 of a and b, `high` from the others.
KLLM_INLINE void interleave16(vw a, vw b, vw& low, vw& high) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i index = _mm512_load_si512(kLow);
  low.v = _mm512_permutex2var_epi16(a.v, index, b.v);
  high.v = _mm512_permutex2var_epi16(a.v, _mm512_add_epi16(index, _mm512_set1_epi16(16)), b.v);
}

// Bytes of four rows, four to a word: word j of the 16-byte piece L of result i holds byte 16 L + 4 i + j of a .. d.
KLLM_INLINE void interleave8(vw a, vw b, vw c, vw d, vw (&words)[4]) {
  __m512i ab = _mm512_unpacklo_epi8(a.v, b.v), ab2 = _mm512_unpackhi_epi8(a.v, b.v);
  __m512i cd = _mm512_unpacklo_epi8(c.v, d.v), cd2 = _mm512_unpackhi_epi8(c.v, d.v);
  words[0].v = _mm512_unpacklo_epi16(ab, cd);
  words[1].v = _mm512_unpackhi_epi16(ab, cd);
  words[2].v = _mm512_unpacklo_epi16(ab2, cd2);
  words[3].v = _mm512_unpackhi_epi16(ab2, cd2);
}

// Signed bytes q as q + 128.
KLLM_INLINE vw unsigned_bytes(vw a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi32((int)0x80808080))}; }

// The largest lane of each of four rows, in every four lanes.
KLLM_INLINE __m512 tops_of_four(vf a, vf b, vf c, vf d) {
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512 quarters = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m512 halves = _mm512_max_ps(quarters, _mm512_shuffle_f32x4(quarters, quarters, 0x4e));
  return _mm512_max_ps(halves, _mm512_shuffle_f32x4(halves, halves, 0xb1));
}

// Lane r: the largest lane of row r; lanes past the rows are of any value.
template <int kRows>
KLLM_INLINE vf tops(const vf (&row)[kRows]) {
  static_assert(kRows <= 8);
  auto at = [&](int r) { return row[r < kRows ? r : 0]; };
  const __m512 first = tops_of_four(at(0), at(1), at(2), at(3));
  if constexpr (kRows <= 4) return {first};
  return {_mm512_mask_blend_ps(0xf0, first, tops_of_four(at(4), at(5), at(6), at(7)))};
}

// Sixty-four numbers below 256 as bytes, in order.
KLLM_INLINE vw join_bytes(const vi (&a)[4]) {
  alignas(64) static constexpr int32_t kOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const __m512i words[2] = {_mm512_packs_epi32(a[0].v, a[1].v), _mm512_packs_epi32(a[2].v, a[3].v)};
  return {_mm512_permutexvar_epi32(_mm512_load_si512(kOrder), _mm512_packus_epi16(words[0], words[1]))};
}

// log2 of positive numbers, to 2.2e-6: a minimax polynomial on mantissas of 0.75 to 1.5.
KLLM_INLINE vf log2(vf x) {
  const __m512 m = _mm512_getmant_ps(x.v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src), e = _mm512_getexp_ps(x.v);
  const __mmask16 upper = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.5f), _CMP_GE_OQ);
  const vf z = {_mm512_sub_ps(_mm512_mask_mul_ps(m, upper, m, _mm512_set1_ps(0.5f)), _mm512_set1_ps(1.0f))};
  const vf exponent = {_mm512_mask_add_ps(e, upper, e, _mm512_set1_ps(1.0f))};
  vf p = fma(set1(-1.451791980e-01f), z, set1(2.927266545e-01f));
  p = fma(p, z, set1(-3.710692778e-01f));
  p = fma(p, z, set1(4.816455971e-01f));
  p = fma(p, z, set1(-7.210945316e-01f));
  p = fma(p, z, set1(1.442681607e+00f));
  return fma(p, z, exponent);
}

// The two low bytes of every lane.
KLLM_INLINE void split_bytes(vi a, uint8_t* low, uint8_t* high) {
  _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(a.v));
  _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(_mm512_srli_epi32(a.v, 8)));
}

#else  // AVX2, FMA, F16C

KLLM_INLINE __m256i join2(const void* a, const void* b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)a)),
                                 _mm_loadu_si128((const __m128i*)b), 1);
}
KLLM_INLINE vw join4(const void* a, const void* b, const void* c, const void* d) { return {join2(a, b), join2(c, d)}; }

KLLM_INLINE void half_transpose4(__m256i& a, __m256i& b, __m256i& c, __m256i& d) {
  __m256i ab = _mm256_unpacklo_epi32(a, b), ab2 = _mm256_unpackhi_epi32(a, b);
  __m256i cd = _mm256_unpacklo_epi32(c, d), cd2 = _mm256_unpackhi_epi32(c, d);
  a = _mm256_unpacklo_epi64(ab, cd);
  b = _mm256_unpackhi_epi64(ab, cd);
  c = _mm256_unpacklo_epi64(ab2, cd2);
  d = _mm256_unpackhi_epi64(ab2, cd2);
}
KLLM_INLINE void transpose4(vw& a, vw& b, vw& c, vw& d) {
  half_transpose4(a.a, b.a, c.a, d.a);
  half_transpose4(a.b, b.b, c.b, d.b);
}

KLLM_INLINE vf as_floats(vw x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

KLLM_INLINE vf first_n(vf x, int n, vf y) {
  const __m256i count = _mm256_set1_epi32(n), index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, index));
  __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(index, _mm256_set1_epi32(8))));
  return {_mm256_blendv_ps(y.a, x.a, low), _mm256_blendv_ps(y.b, x.b, high)};
}

template <int kRows>
KLLM_INLINE vf tops(const vf (&row)[kRows]) {
  alignas(32) float lanes[kLanes] = {};
  for (int r = 0; r < kRows; ++r) lanes[r] = top(row[r]);
  return load(lanes);
}

KLLM_INLINE vw unsigned_bytes(vw x) {
  const __m256i sign = _mm256_set1_epi32((int)0x80808080);
  return {_mm256_xor_si256(x.a, sign), _mm256_xor_si256(x.b, sign)};
}

template <int kIndex>
KLLM_INLINE vf signed_byte(vw x) {
  auto half = [](__m256i w) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * kIndex), 24));
  };
  return {half(x.a), half(x.b)};
}

KLLM_INLINE vf round_bf16(vf x) {
  auto half = [](__m256 f) {
    __m256i bits = _mm256_castps_si256(f);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000)));
  };
  return {half(x.a), half(x.b)};
}

#endif

}  // namespace kllm::KLLM_ISA
