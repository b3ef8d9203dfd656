// Softmax over keys that arrive tile by tile: running maximum and denominator of every row.
//
// Scores are kept in units of log2, so that a power of two is all that has to be computed. Exponentials are functions
// of one row only and the sums keep sixteen lanes apart (lane = key modulo 16) until the end.
#pragma once

#include <limits>

#include "shuffle.h"

namespace kllm::KLLM_ISA {

constexpr float kNone = -std::numeric_limits<float>::infinity();  // maximum of no keys
constexpr float kMasked = -1e30f;  // score of a key that is not seen: finite, so that its power is 0 and never NaN

// 2^x for x <= 0, 1 at 0. Minimax polynomials of 2^r on [-1/2, 1/2]: relative error 9e-8, or 1e-4 where results are
// rounded to bfloat16 or bytes anyway.
template <bool kCoarse>
KLLM_INLINE vf power2(vf x) {
  vf n = round(x), r = x - n, p;
  if constexpr (kCoarse) {
    p = fma(set1(5.500892866e-02f), r, set1(2.422109601e-01f));
    p = fma(p, r, set1(6.932829276e-01f));
  } else {
    p = fma(set1(1.326472640e-03f), r, set1(9.671512697e-03f));
    p = fma(p, r, set1(5.550733746e-02f));
    p = fma(p, r, set1(2.402224208e-01f));
    p = fma(p, r, set1(6.931469776e-01f));
  }
  return scale2(fma(p, r, set1(1.0f)), n);
}

inline float power2_of(float x) {
  alignas(64) float lanes[kLanes];
  store(lanes, power2<false>(set1(x)));
  return lanes[0];
}

// What sums so far are multiplied with when the maximum rises from `before` to `after`.
inline float rescaling(float before, float after) {
  return before == after ? 1.0f : before == kNone ? 0.0f : power2_of(before - after);
}
// The same of sixteen rows, whose `after` are not kNone.
KLLM_INLINE vf rescalings(vf before, vf after) { return power2<false>(max(before - after, set1(-200.0f))); }

// Maxima of up to sixteen rows: in a tile and after it, and what sums of before and (of bytes only) of the tile are
// multiplied with.
struct Maxima {
  alignas(64) float tile[kLanes];
  alignas(64) float after[kLanes];
  alignas(64) float factors[kLanes];
  alignas(64) float gains[kLanes];

  // maximum: of rows [0, count), raised by those of the tile.
  KLLM_INLINE void raise(float* maximum, int count, vf here) {
    const vf was = load_n(maximum, count), now = max(was, here);
    store_n(maximum, now, count);
    store(tile, here);
    store(after, now);
    store(factors, rescalings(was, now));
  }
};

}  // namespace kllm::KLLM_ISA
