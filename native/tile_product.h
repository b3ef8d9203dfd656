// Products of a few broadcast rows with a tile of 64-byte lines: the inner loops of attention.
//
// A tile is [steps][lines] of 64 bytes. One step holds, per lane, kDepth consecutive elements of the summed dimension
// (32 bits), and a row has the same 32 bits a step. Every sum runs over the steps in ascending order in its own lane,
// so how rows and lines are grouped into registers changes no bit of a result.
#pragma once

#include "shuffle.h"

namespace kllm::KLLM_ISA {

struct FloatDot {
  using Word = vf;
  using Sum = vf;
  static constexpr int kDepth = 1;
  static KLLM_INLINE vf line(const uint8_t* p) { return load((const float*)p); }
  static KLLM_INLINE vf line(vw a) { return as_floats(a); }
  static KLLM_INLINE vf spread(const uint8_t* p) { return set1(*(const float*)p); }
  static KLLM_INLINE vf dot(vf acc, vf line, vf row) { return fma(line, row, acc); }
};

struct PairDot {
  using Word = vw;
  using Sum = vf;
  static constexpr int kDepth = 2;
  static KLLM_INLINE vw line(const uint8_t* p) { return wload(p); }
  static KLLM_INLINE vw line(vw a) { return a; }
  static KLLM_INLINE vw spread(const uint8_t* p) { return wset32(p); }
  static KLLM_INLINE vf dot(vf acc, vw line, vw row) { return dot_bf16(acc, line, row); }
};

// Bytes, exactly. Of scores the line is unsigned (k + 128), of values the row is (probabilities).
template <bool kUnsignedRow>
struct ByteDot {
  using Word = vw;
  using Sum = vi;
  static constexpr int kDepth = 4;
  static KLLM_INLINE vw line(const uint8_t* p) { return wload(p); }
  static KLLM_INLINE vw line(vw a) { return a; }
  static KLLM_INLINE vw spread(const uint8_t* p) { return wset32(p); }
  static KLLM_INLINE vi dot(vi acc, vw line, vw row) {
    return kUnsignedRow ? dot_u8s8(acc, row, line) : dot_u8s8(acc, line, row);
  }
};

// As many accumulators as registers allow.
#if defined(__AVX512F__)
constexpr int kRowBlock = 6, kLineBlock = 4;
#else
constexpr int kRowBlock = 6, kLineBlock = 1;
#endif

struct TileRows {
  const uint8_t* data;
  size_t stride;  // bytes
};

struct TileLines {
  const uint8_t* data;
  size_t stride;  // bytes from step to step

  void skip(int lines) { data += lines * 64; }
  template <class Dot, int kLines>
  KLLM_INLINE void read(int step, typename Dot::Word (&line)[kLines]) const {
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) line[n] = Dot::line(data + step * stride + n * 64);
  }
};

// Lines: TileLines or whatever else has its functions.
template <class Dot, int kRows, int kLines, class Lines>
KLLM_INLINE void accumulate(typename Dot::Sum (&acc)[kRows][kLines], int steps, TileRows rows, Lines& from) {
  Lines lines = from;
  for (int step = 0; step < steps; ++step) {
    typename Dot::Word line[kLines];
    lines.template read<Dot>(step, line);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      typename Dot::Word x = Dot::spread(rows.data + r * rows.stride + step * 4);
#pragma GCC unroll 8
      for (int n = 0; n < kLines; ++n) acc[r][n] = Dot::dot(acc[r][n], line[n], x);
    }
  }
  from = lines;
}

// 0, which the compiler does not know: GCC clears an array of known zeros in memory, and leaves it there.
KLLM_INLINE int32_t hidden_zero() {
  int32_t value = 0;
  asm("" : "+r"(value));
  return value;
}

#if defined(__AVX512F__)
// Has the compiler keep a sum in a register up to here: it would rather spill some in every step of a loop.
KLLM_INLINE void in_register(vf& a) { asm("" : "+v"(a.v)); }
KLLM_INLINE void in_register(vi& a) { asm("" : "+v"(a.v)); }
#else
template <class Sum>
KLLM_INLINE void in_register(Sum&) {}
#endif

// Where sums start and end. Both are called for every row r and line n of a block, before and after the steps.

// out[r] = rows[r] x lines
struct SetFloats {
  float* out;
  size_t stride;
  void skip(int lines) { out += lines * kLanes; }
  KLLM_INLINE vf begin(int, int) const { return to_float(iset1(hidden_zero())); }
  template <int kRows, int kLines>
  KLLM_INLINE void end(const vf (&acc)[kRows][kLines]) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < kLines; ++n) store(out + r * stride + n * kLanes, acc[r][n]);
    }
  }
};

// out[r] = factors[r] * out[r] + rows[r] x lines
struct AddFloats : SetFloats {
  const float* factors;
  KLLM_INLINE vf begin(int r, int n) const { return load(out + r * stride + n * kLanes) * set1(factors[r]); }
};

// out[r] = starts[r] + rows[r] x lines
struct SetInts {
  int32_t* out;
  size_t stride;
  const int32_t* starts;
  void skip(int lines) { out += lines * kLanes; }
  KLLM_INLINE vi begin(int r, int) const { return iset1(starts[r]); }
  template <int kRows, int kLines>
  KLLM_INLINE void end(const vi (&acc)[kRows][kLines]) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < kLines; ++n) istore(out + r * stride + n * kLanes, acc[r][n]);
    }
  }
};

// out[r] = factors[r] * out[r] + units[r] * rows[r] x lines; with kBytes of 2 rows come in twos, high and low bytes:
// 256 rows[2 r] + rows[2 r + 1] instead of rows[r].
template <int kBytes>
struct AddInts {
  float* out;
  size_t stride;
  const float* factors;
  const float* units;
  void skip(int lines) { out += lines * kLanes; }
  KLLM_INLINE vi begin(int, int) const { return iset1(hidden_zero()); }
  template <int kRows, int kLines>
  KLLM_INLINE void end(const vi (&acc)[kRows][kLines]) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows / kBytes; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < kLines; ++n) {
        float* to = out + r * stride + n * kLanes;
        vi sum = acc[kBytes * r][n];
        if constexpr (kBytes == 2) sum = sum * iset1(256) + acc[2 * r + 1][n];
        store(to, fma(load(to), set1(factors[r]), to_float(sum) * set1(units[r])));
      }
    }
  }
};

template <class Dot, int kRows, int kLines, class Lines, class End>
KLLM_APART void multiply_block(int steps, TileRows rows, Lines& lines, const End& end) {
  typename Dot::Sum acc[kRows][kLines];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) acc[r][n] = end.begin(r, n);
  }
  accumulate<Dot, kRows, kLines>(acc, steps, rows, lines);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) in_register(acc[r][n]);
  }
  end.end(acc);
}

// All `count` lines of every step.
template <class Dot, int kRows, class Lines, class End>
inline void multiply(int steps, TileRows rows, Lines& lines, int count, End end) {
  for (; count >= kLineBlock; count -= kLineBlock) {
    multiply_block<Dot, kRows, kLineBlock>(steps, rows, lines, end);
    lines.skip(kLineBlock);
    end.skip(kLineBlock);
  }
  if constexpr (kLineBlock > 1) {
    if (count == 3) multiply_block<Dot, kRows, 3>(steps, rows, lines, end);
    if (count == 2) multiply_block<Dot, kRows, 2>(steps, rows, lines, end);
    if (count == 1) multiply_block<Dot, kRows, 1>(steps, rows, lines, end);
  }
}

}  // namespace kllm::KLLM_ISA
