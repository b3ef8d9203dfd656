// Sixteen lanes of float or int32, whatever the instruction set: one AVX-512 register or two AVX2 registers.
//
// Compiled once per instruction set: KLLM_ISA names the namespace, so that the copies do not collide.
// Reductions over lanes add in one fixed order, so equal inputs give equal bits within an instruction set.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifndef KLLM_ISA
#error "include this from a file that names its instruction set, such as isa_avx512.cpp"
#endif

#define KLLM_INLINE inline __attribute__((always_inline))
// A loop that needs all registers: inlined into a longer function it would share them.
#define KLLM_APART __attribute__((noinline))

namespace kllm::KLLM_ISA {

constexpr int kLanes = 16;

// Asks for a line in the second-level cache. Assembly, because gcc 12 keeps accumulators in memory in a loop that
// contains __builtin_prefetch.
KLLM_INLINE void fetch_l2(const void* line) { asm volatile("prefetcht1 (%0)" : : "r"(line)); }
// Asks for a line that is going to be written.
KLLM_INLINE void fetch_to_write(const void* line) { asm volatile("prefetchw (%0)" : : "r"(line)); }

#if defined(__AVX512F__)

struct vf { __m512 v; };
struct vi { __m512i v; };
struct vw { __m512i v; };  // 64 raw bytes: 16 pairs of bfloat16, or 16 groups of 4 bytes

KLLM_INLINE vf zero() { return {_mm512_setzero_ps()}; }
KLLM_INLINE vf set1(float x) { return {_mm512_set1_ps(x)}; }
KLLM_INLINE vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
KLLM_INLINE void store(float* p, vf a) { _mm512_storeu_ps(p, a.v); }
KLLM_INLINE vf load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
KLLM_INLINE void store_n(float* p, vf a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
KLLM_INLINE vf operator+(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
KLLM_INLINE vf operator-(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
KLLM_INLINE vf operator*(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
KLLM_INLINE vf operator/(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
KLLM_INLINE vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
KLLM_INLINE vf max(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
KLLM_INLINE vf min(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
KLLM_INLINE vf abs(vf a) { return {_mm512_abs_ps(a.v)}; }
KLLM_INLINE vf round(vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
KLLM_INLINE vf scale2(vf a, vf n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // a * 2^n, n whole
KLLM_INLINE vf load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
KLLM_INLINE vf load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
KLLM_INLINE void store_bf16(uint16_t* p, vf a) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v));
#else
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
#endif
}

KLLM_INLINE vi izero() { return {_mm512_setzero_si512()}; }
KLLM_INLINE vi iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
KLLM_INLINE vi iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
KLLM_INLINE void istore(int32_t* p, vi a) { _mm512_storeu_si512(p, a.v); }
KLLM_INLINE vi operator+(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
KLLM_INLINE vi operator-(vi a, vi b) { return {_mm512_sub_epi32(a.v, b.v)}; }
KLLM_INLINE vi operator*(vi a, vi b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
KLLM_INLINE vf to_float(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
KLLM_INLINE vi to_int(vf a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest, ties to even
KLLM_INLINE vi load_i8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
KLLM_INLINE vi load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
KLLM_INLINE void store_i8(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }  // saturates

KLLM_INLINE vw wload(const void* p) { return {_mm512_loadu_si512(p)}; }
KLLM_INLINE void wstore(void* p, vw a) { _mm512_storeu_si512(p, a.v); }
KLLM_INLINE vw wset32(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
KLLM_INLINE vw low_nibbles(vw a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
KLLM_INLINE vw high_nibbles(vw a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }

KLLM_INLINE vf as_float(vw a) { return {_mm512_castsi512_ps(a.v)}; }
KLLM_INLINE vf even_bf16(vw a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
KLLM_INLINE vf odd_bf16(vw a) { return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32((int)0xffff0000)))}; }

// acc[lane] + w[2 lane] a[2 lane] + w[2 lane + 1] a[2 lane + 1]
KLLM_INLINE vf dot_bf16(vf acc, vw w, vw a) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)a.v)};
#else
  return fma(odd_bf16(w), odd_bf16(a), fma(even_bf16(w), even_bf16(a), acc));
#endif
}

// acc[lane] + sum of 4 products, w unsigned and a signed; exact
KLLM_INLINE vi dot_u8s8(vi acc, vw w, vw a) { return {_mm512_dpbusd_epi32(acc.v, w.v, a.v)}; }

KLLM_INLINE float sum(vf a) {
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}
KLLM_INLINE float top(vf a) { return _mm512_reduce_max_ps(a.v); }
KLLM_INLINE int32_t isum(vi a) { return _mm512_reduce_add_epi32(a.v); }

#else  // AVX2, FMA, F16C

struct vf { __m256 a, b; };
struct vi { __m256i a, b; };
struct vw { __m256i a, b; };

KLLM_INLINE vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KLLM_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KLLM_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KLLM_INLINE void store(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
KLLM_INLINE vf load_n(const float* p, int n) {
  alignas(32) float t[16] = {};
  memcpy(t, p, n * sizeof(float));
  return load(t);
}
KLLM_INLINE void store_n(float* p, vf x, int n) {
  alignas(32) float t[16];
  store(t, x);
  memcpy(p, t, n * sizeof(float));
}
KLLM_INLINE vf operator+(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
KLLM_INLINE vf operator-(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
KLLM_INLINE vf operator*(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
KLLM_INLINE vf operator/(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
KLLM_INLINE vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
KLLM_INLINE vf max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
KLLM_INLINE vf min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
KLLM_INLINE vf abs(vf x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
KLLM_INLINE vf round(vf x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
KLLM_INLINE vf scale2(vf x, vf n) {
  auto power = [](__m256 e) {
    __m256i i = _mm256_cvtps_epi32(_mm256_max_ps(e, _mm256_set1_ps(-127)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, _mm256_set1_epi32(127)), 23));
  };
  return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))};
}
KLLM_INLINE __m256 half_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
KLLM_INLINE vf load_bf16(const uint16_t* p) {
  return {half_bf16(_mm_loadu_si128((const __m128i*)p)), half_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
KLLM_INLINE vf load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
KLLM_INLINE void store_bf16(uint16_t* p, vf x) {
  auto rounded = [](__m256 f) {
    __m256i bits = _mm256_castps_si256(f);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  };
  __m256i packed = _mm256_packus_epi32(rounded(x.a), rounded(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

KLLM_INLINE vi izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
KLLM_INLINE vi iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
KLLM_INLINE vi iload(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
KLLM_INLINE void istore(int32_t* p, vi x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
KLLM_INLINE vi operator+(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
KLLM_INLINE vi operator-(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
KLLM_INLINE vi operator*(vi x, vi y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
KLLM_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
KLLM_INLINE vi to_int(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
KLLM_INLINE vi load_i8(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
KLLM_INLINE vi load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
KLLM_INLINE void store_i8(int8_t* p, vi x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

KLLM_INLINE vw wload(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)((const char*)p + 32))};
}
KLLM_INLINE void wstore(void* p, vw x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)((char*)p + 32), x.b);
}
KLLM_INLINE vw wset32(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
KLLM_INLINE vw low_nibbles(vw x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
KLLM_INLINE vw high_nibbles(vw x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
KLLM_INLINE vf as_float(vw x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
KLLM_INLINE vf even_bf16(vw x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
KLLM_INLINE vf odd_bf16(vw x) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}
KLLM_INLINE vf dot_bf16(vf acc, vw w, vw a) { return fma(odd_bf16(w), odd_bf16(a), fma(even_bf16(w), even_bf16(a), acc)); }

// vpmaddubsw saturates at 16 bits, so bytes are widened first: even and odd ones, two products a lane each.
KLLM_INLINE __m256i half_dot(__m256i acc, __m256i w, __m256i a) {
  const __m256i low = _mm256_set1_epi16(255);
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, low), _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(a, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
KLLM_INLINE vi dot_u8s8(vi acc, vw w, vw a) { return {half_dot(acc.a, w.a, a.a), half_dot(acc.b, w.b, a.b)}; }

KLLM_INLINE float sum(vf x) {
  __m256 half = _mm256_add_ps(x.a, x.b);
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}
KLLM_INLINE float top(vf x) {
  __m256 half = _mm256_max_ps(x.a, x.b);
  __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}
KLLM_INLINE int32_t isum(vi x) {
  alignas(32) int32_t t[16];
  istore(t, x);
  int32_t total = 0;
  for (int32_t value : t) total += value;
  return total;
}

#endif

// e^x to about 2 units in the last place; 0 below -87.3. Range reduction and polynomial as in Cephes' expf.
KLLM_INLINE vf exp(vf x) {
  x = max(min(x, set1(88.0f)), set1(-104.0f));
  vf n = round(x * set1(1.44269504088896341f));
  vf r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return scale2(p, n);
}

// 1 / x of positive numbers, to two units in the last place.
KLLM_INLINE vf inverse(vf x) {
#if defined(__AVX512F__)
  const vf near = {_mm512_rcp14_ps(x.v)};
  return near * (set1(2.0f) - x * near);
#else
  return set1(1.0f) / x;
#endif
}

KLLM_INLINE vf silu(vf x) { return x * inverse(set1(1.0f) + exp(zero() - x)); }

inline float bf16_to_float(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace kllm::KLLM_ISA
