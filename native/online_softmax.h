// Softmax over keys that arrive tile by tile: running maximum and denominator of every row.
//
// Scores are kept in units of log2, so that a power of two is all that has to be computed. Exponentials are functions
// of one row only and the sums keep sixteen lanes apart (lane = key modulo 16) until the end.
#pragma once

#include <limits>

#include "shuffle.h"

namespace kllm::KLLM_ISA {

constexpr float kNone = -std::numeric_limits<float>::infinity();  // maximum of no keys

// 2^x for x <= 0, 1 at 0. Minimax polynomials of 2^r on [-1/2, 1/2]: relative error 9e-8, or 3e-6 where results are
// rounded to bfloat16 anyway.
template <bool kCoarse>
KLLM_INLINE vf power2(vf x) {
  vf n = round(x), r = x - n, p;
  if constexpr (kCoarse) {
    p = fma(set1(9.582852466e-03f), r, set1(5.590642550e-02f));
    p = fma(p, r, set1(2.402409863e-01f));
    p = fma(p, r, set1(6.931241933e-01f));
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

// What the sums so far are multiplied with when the maximum rises from `before` to `after`.
inline float rescaling(float before, float after) {
  return before == after ? 1.0f : before == kNone ? 0.0f : power2_of(before - after);
}

struct RowSums {
  float* maximum;  // one value
  float* total;    // [16]
};

// One row and tile: p, scores at first, of which `visible` count, become probabilities relative to the new maximum;
// masked ones are 0. scale: of the scores, log2(e) included; key_scales: further factors of the scores, or null.
// kRounded: probabilities are rounded to bfloat16, also in the total. Returns the factor for sums made before.
template <int kLines, bool kRounded>
KLLM_INLINE float softmax_lines(vf (&p)[kLines], int visible, float scale, const float* key_scales, RowSums sums) {
  constexpr int kLast = kLines - 1;
  const float before = *sums.maximum;
  vf peak = set1(before);
#pragma GCC unroll 4
  for (int i = 0; i < kLines; ++i) {
    p[i] = p[i] * set1(scale);
    if (key_scales) p[i] = p[i] * load(key_scales + i * kLanes);
    if (i == kLast) p[i] = first_n(p[i], visible - i * kLanes, set1(kNone));
    peak = max(peak, p[i]);
  }
  const float after = top(peak);
  *sums.maximum = after;
#pragma GCC unroll 4
  for (int i = 0; i < kLines; ++i) {
    p[i] = power2<kRounded>(p[i] - set1(after));
    if constexpr (kRounded) p[i] = round_bf16(p[i]);
    if (i == kLast) p[i] = first_n(p[i], visible - i * kLanes, zero());
  }
  const float factor = rescaling(before, after);
  vf total = fma(load(sums.total), set1(factor), p[0]);
#pragma GCC unroll 4
  for (int i = 1; i < kLines; ++i) total = total + p[i];
  store(sums.total, total);
  return factor;
}

}  // namespace kllm::KLLM_ISA
