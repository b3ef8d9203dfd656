// Parallel regions around the kernels' tasks: how rows, panels and heads are cut for the threads.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"
#include "pool.h"

namespace kllm {

// Memory that grows and is never shrunk: scratch of a step.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const size_t unit = bytes < kHugePage / 2 ? 64 : kHugePage;
      const size_t whole = (bytes + unit - 1) / unit * unit;
      data_ = std::aligned_alloc(unit, whole);
      if (!data_) throw std::bad_alloc();
      // Results go to a line in each of many rows: with small pages that is a page each. A refusal costs speed, nothing else.
      if (unit == kHugePage) madvise(data_, whole, MADV_HUGEPAGE);
      size_ = bytes;
    }
    return data_;
  }
  template <class T>
  T* of(size_t count) { return (T*)get(count * sizeof(T)); }

 private:
  static constexpr size_t kHugePage = 2 << 20;
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Activations with memory of their own.
class ActivationBuffer {
 public:
  const Activations& shape(Type type, int rows, int cols);

 private:
  Activations view_{};
  Buffer data_, scales_, sums_;
};

// Scratch of every thread of the pool, one slice each.
class Scratch {
 public:
  void reserve(int threads, size_t bytes);
  void* slice(int thread) const { return (uint8_t*)data_ + (size_t)thread * bytes_; }
  size_t bytes() const { return bytes_; }

 private:
  Buffer buffer_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Bytes a thread needs for products with this matrix.
size_t product_scratch(const Matrix& matrix);

// What activations for this matrix are to be where a type is asked for.
Type activation_type(const Matrix& matrix, Type wanted);

// x float [rows, cols], through a norm if there is one, to `out`.
void prepare(const float* x, size_t stride, const float* norm, float eps, const Activations& out);

// sink.y = x matrix^T, as the sink says.
void multiply(const Matrix& matrix, const Activations& x, const Sink& sink, const Scratch& scratch);

}  // namespace kllm
