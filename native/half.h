// bfloat16 and fp16 in plain C++, for code that is not compiled per instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kllm {

inline float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline float from_bf16(uint16_t x) { return from_bits((uint32_t)x << 16); }

inline uint16_t to_bf16(float f) {  // nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_half(uint16_t x) {
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16;
  const int exponent = x >> 10 & 31;
  const uint32_t mantissa = x & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return from_bits(sign | 0) + (sign ? -1.0f : 1.0f) * std::ldexp((float)mantissa, -24);
  return from_bits(sign | (uint32_t)(exponent + 112) << 23 | mantissa << 13);
}

}  // namespace kllm
