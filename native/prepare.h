// Activations as products want them: an RMS norm on the way, then float32, bfloat16, int8 in groups of 32 columns, or two
// bytes in whole rows.
#pragma once

#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace kllm::KLLM_ISA {

// 1 / root mean square, of mean(x²) + eps.
inline float inverse_root(const float* x, int cols, float eps) {
  constexpr int chains = 4;  // sums of their own, so that one addition need not wait for the last
  vf squares[chains] = {zero(), zero(), zero(), zero()};
  int column = 0;
  for (; column + chains * kLanes <= cols; column += chains * kLanes)
    for (int c = 0; c < chains; ++c) {
      const vf value = load(x + column + c * kLanes);
      squares[c] = fma(value, value, squares[c]);
    }
  for (; column < cols; column += kLanes) {
    const vf value = load_n(x + column, cols - column < kLanes ? cols - column : kLanes);
    squares[0] = fma(value, value, squares[0]);
  }
  return 1 / std::sqrt(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)cols + eps);
}

KLLM_INLINE void quantize_group(vf first, vf second, int8_t* out, float& scale, int32_t& total) {
  const float most = top(max(abs(first), abs(second)));
  const vf inverse = set1(most > 0 ? 127 / most : 0);
  const vi low = to_int(first * inverse), high = to_int(second * inverse);
  store_i8(out, low);
  store_i8(out + kLanes, high);
  scale = most / 127;
  total = isum(low + high);
}

// One row on its way out, 32 columns at a time.
struct PreparedRow {
  Type type;
  uint8_t* data;
  float* scales;
  int32_t* sums;

  KLLM_INLINE void put(int group, vf first, vf second) const {
    const int column = group * kBlock;
    if (type == Type::kF32) {
      store((float*)data + column, first);
      store((float*)data + column + kLanes, second);
    } else if (type == Type::kBF16) {
      store_bf16((uint16_t*)data + column, first);
      store_bf16((uint16_t*)data + column + kLanes, second);
    } else {
      quantize_group(first, second, (int8_t*)data + column, scales[group], sums[group]);
    }
  }

  KLLM_INLINE void put_normed(int group, const float* x, const float* norm, vf inverse) const {
    vf first = load(x), second = load(x + kLanes);
    if (norm) {
      first = first * inverse * load(norm);
      second = second * inverse * load(norm + kLanes);
    }
    put(group, first, second);
  }
};

inline void prepare_row(const float* x, const float* norm, float eps, int cols, int groups, const PreparedRow& out) {
  const vf inverse = set1(norm ? inverse_root(x, cols, eps) : 1);
  const int whole = cols / kBlock, rest = cols % kBlock;
  for (int group = 0; group < whole; ++group)
    out.put_normed(group, x + group * kBlock, norm ? norm + group * kBlock : nullptr, inverse);
  if (rest) {
    alignas(64) float last[kBlock] = {}, last_norm[kBlock] = {};
    memcpy(last, x + whole * kBlock, rest * sizeof(float));
    if (norm) memcpy(last_norm, norm + whole * kBlock, rest * sizeof(float));
    out.put_normed(whole, last, norm ? last_norm : nullptr, inverse);
  }
  for (int group = whole + (rest > 0); group < groups; ++group) out.put(group, zero(), zero());
}

// A row as two bytes a number, to 1 / 64,516 of its largest. A number that is not finite makes the scale NaN, and so all that
// is multiplied with the row: bytes cannot tell.
inline void prepare_row_i16(const float* x, const float* norm, float eps, const Activations& out, int row) {
  const vf inverse = set1(norm ? inverse_root(x, out.cols, eps) : 1);
  auto at = [&](int column) {
    const int left = out.cols - column;
    if (left <= 0) return zero();
    const vf value = left >= kLanes ? load(x + column) : load_n(x + column, left);
    if (!norm) return value;
    return value * inverse * (left >= kLanes ? load(norm + column) : load_n(norm + column, left));
  };
  vf peak = zero(), spoilt = zero();
  for (int column = 0; column < out.stride; column += kLanes) {
    const vf value = at(column);
    peak = max(peak, abs(value));
    spoilt = fma(value, zero(), spoilt);
  }
  const float most = top(peak);
  const vf scale = set1(most > 0 ? 127 / most : 0);
  int8_t* high = (int8_t*)out.row(row);
  int8_t* low = high + out.stride;
  vi sums[2] = {izero(), izero()};
  for (int column = 0; column < out.stride; column += kLanes) {
    const vf value = at(column) * scale, whole = round(value);
    const vi bytes[2] = {to_int(whole), to_int((value - whole) * set1(254.0f))};
    store_i8(high + column, bytes[0]);
    store_i8(low + column, bytes[1]);
    for (int part = 0; part < 2; ++part) sums[part] = sums[part] + bytes[part];
  }
  out.scales[row] = most / 127 + sum(spoilt);
  for (int part = 0; part < 2; ++part) out.sums[2 * row + part] = isum(sums[part]);
}

// Rows [row, row_end) of x to activations: x * norm / root of (mean(x²) + eps), or x where norm, [cols], is null.
inline void prepare(const float* x, size_t stride, const float* norm, float eps, const Activations& out, int row, int row_end) {
  const size_t groups = out.stride / kBlock;
  for (; out.type == Type::kI16 && row < row_end; ++row) prepare_row_i16(x + row * stride, norm, eps, out, row);
  for (; row < row_end; ++row) {
    PreparedRow target{out.type, (uint8_t*)out.row(row), nullptr, nullptr};
    if (out.type == Type::kI8) {
      target.scales = out.scales + row * groups;
      target.sums = out.sums + row * groups;
    }
    prepare_row(x + row * stride, norm, eps, out.cols, (int)groups, target);
  }
}

}  // namespace kllm::KLLM_ISA
