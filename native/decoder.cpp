#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "machine.h"

namespace kllm {

namespace {

constexpr int kSerialRotations = 4;  // tokens below which the caller rotates alone

bool is_quantised(const Matrix& matrix) { return matrix.format != Format::kF32 && matrix.format != Format::kBF16; }

const float* or_null(const Vector& vector) { return vector.empty() ? nullptr : vector.data(); }

}  // namespace

// Adds the time since the last mark to a phase.
class Decoder::Timer {
 public:
  explicit Timer(Decoder& decoder) : decoder_(decoder) {
    if (decoder_.timing) last_ = Clock::now();
  }
  void mark(Phase phase) {
    if (!decoder_.timing) return;
    const auto now = Clock::now();
    decoder_.seconds_[(int)phase] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Decoder& decoder_;
  Clock::time_point last_;
};

Decoder::Decoder(DecoderShape shape, const float* cos, const float* sin, int positions, const float* final_norm)
    : shape_(shape), final_norm_(final_norm, final_norm + shape.hidden) {
  if (shape.hidden < 1 || shape.kv_heads < 1 || shape.heads % shape.kv_heads || shape.head_dim < 2 || shape.head_dim % 2)
    throw std::invalid_argument("a decoder needs whole groups of heads of even size");
  cos_.assign(cos, cos + (size_t)positions * shape.head_dim);
  sin_.assign(sin, sin + (size_t)positions * shape.head_dim);
}

void Decoder::add_layer(DecoderLayer layer) {
  const int q = shape_.heads * shape_.head_dim, kv = shape_.kv_heads * shape_.head_dim;
  const bool fits = layer.qkv->cols == shape_.hidden && layer.qkv->rows == q + 2 * kv && layer.out->cols == q &&
                    layer.out->rows == shape_.hidden && layer.gate_up->cols == shape_.hidden && layer.gate_up->gated &&
                    layer.down->cols == layer.gate_up->rows / 2 && layer.down->rows == shape_.hidden;
  if (!fits) throw std::invalid_argument("the matrices of a layer do not fit each other");
  for (const auto* matrix : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
    product_scratch_ = std::max(product_scratch_, product_scratch(**matrix));
  layers_.push_back(std::move(layer));
}

Type Decoder::type_for(const Matrix& matrix) const {
  return is_quantised(matrix) && shape_.int8_products ? activation_type(matrix, Type::kI8) : shape_.product;
}

const Activations& Decoder::prepared(const float* x, int rows, int cols, size_t stride, const Vector* norm, Type type) {
  const Activations& out = activations_.shape(type, rows, cols);
  prepare(x, stride, norm ? norm->data() : nullptr, shape_.eps, out);
  return out;
}

void Decoder::rotate(const Step& step, const LayerCache& cache, const DecoderLayer& layer) {
  const size_t stride = (size_t)(shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim;
  RotateTask all{(float*)qkv_.get(0), stride, cos_.data(), sin_.data(), step.positions, step.slots, or_null(layer.q_norm),
                 or_null(layer.k_norm), shape_.eps, cache.k, cache.v, cache.k_scales, cache.v_scales, step.cache_type,
                 shape_.heads, shape_.kv_heads, shape_.head_dim, 0, step.tokens};
  pool().run((step.tokens + kSerialRotations - 1) / kSerialRotations, [&](int index, int) {
    RotateTask task = all;
    task.row = index * kSerialRotations;
    task.row_end = std::min(task.row + kSerialRotations, step.tokens);
    kernels().rotate(task);
  });
}

AttentionTask Decoder::attention_over(const Step& step, const LayerCache& cache, float* out) {
  const int width = shape_.heads * shape_.head_dim;
  AttentionTask task{};
  task.q = (const float*)qkv_.get(0);
  task.q_stride = (size_t)width + 2 * (size_t)shape_.kv_heads * shape_.head_dim;
  task.out = out;
  task.out_stride = (size_t)width;
  task.k_cache = cache.k;
  task.v_cache = cache.v;
  task.k_scales = cache.k_scales;
  task.v_scales = cache.v_scales;
  task.cache_type = step.cache_type;
  task.block_tokens = step.block_tokens;
  task.heads = shape_.heads;
  task.kv_heads = shape_.kv_heads;
  task.head_dim = shape_.head_dim;
  task.scale = 1.0f / std::sqrt((float)shape_.head_dim);
  task.exact = !shape_.int8_products;
  return task;
}

void Decoder::mlp(const DecoderLayer& layer, float* x, int rows) {
  Timer timer(*this);
  const int inner = layer.down->cols;
  const Activations& normed = prepared(x, rows, shape_.hidden, shape_.hidden, &layer.mlp_norm, type_for(*layer.gate_up));
  timer.mark(Phase::kPrepare);
  const Type type = type_for(*layer.down);
  if (type == Type::kBF16 && inner % kBlock == 0) {  // the product can write what the next one reads
    const Activations& gated = inner_activations_.shape(type, rows, inner);
    multiply(*layer.gate_up, normed, {Store::kGated, type, gated.data, (size_t)gated.stride, or_null(layer.gate_up_bias)}, scratch_);
    timer.mark(Phase::kGateUp);
    multiply(*layer.down, gated, {Store::kAdd, Type::kF32, x, (size_t)shape_.hidden, or_null(layer.down_bias)}, scratch_);
  } else {
    float* gated = inner_.of<float>((size_t)rows * inner);
    multiply(*layer.gate_up, normed, {Store::kGated, Type::kF32, gated, (size_t)inner, or_null(layer.gate_up_bias)}, scratch_);
    timer.mark(Phase::kGateUp);
    const Activations& ready = inner_activations_.shape(type, rows, inner);
    prepare(gated, inner, nullptr, 0, ready);
    timer.mark(Phase::kPrepare);
    multiply(*layer.down, ready, {Store::kAdd, Type::kF32, x, (size_t)shape_.hidden, or_null(layer.down_bias)}, scratch_);
  }
  timer.mark(Phase::kDown);
}

void Decoder::forward(float* x, const Step& step, const LayerCache* caches, float* out) {
  const int hidden = shape_.hidden, width = shape_.heads * shape_.head_dim;
  const int qkv_width = width + 2 * shape_.kv_heads * shape_.head_dim;
  const bool few = step.wanted_count < step.tokens;
  attention_.all_tokens(step.spans, step.rows, shape_.kv_heads);
  if (few) wanted_attention_.single_tokens(step.spans, step.rows, shape_.kv_heads, step.wanted, step.wanted_count);
  const size_t attention = kernels().attention_scratch(shape_.heads / shape_.kv_heads, shape_.head_dim, step.cache_type);
  scratch_.reserve(pool().threads(), std::max(product_scratch_, attention));
  float* qkv = qkv_.of<float>((size_t)step.tokens * qkv_width);
  float* attended = attended_.of<float>((size_t)step.tokens * width);

  for (int index = 0; index < layers(); ++index) {
    const DecoderLayer& layer = layers_[index];
    const bool last = few && index + 1 == layers();
    Timer timer(*this);
    const Activations& normed = prepared(x, step.tokens, hidden, hidden, &layer.attention_norm, type_for(*layer.qkv));
    timer.mark(Phase::kPrepare);
    multiply(*layer.qkv, normed, {Store::kSet, Type::kF32, qkv, (size_t)qkv_width, or_null(layer.qkv_bias)}, scratch_);
    timer.mark(Phase::kQkv);
    rotate(step, caches[index], layer);
    timer.mark(Phase::kRotate);
    (last ? wanted_attention_ : attention_)
        .run(attention_over(step, caches[index], attended), step.tables, step.table_width, scratch_);
    timer.mark(Phase::kAttention);
    int rows = step.tokens;
    if (last) {  // from here on only the wanted rows, side by side
      rows = step.wanted_count;
      if (rows == 0) return;
      float* kept = wanted_attended_.of<float>((size_t)rows * width);
      for (int i = 0; i < rows; ++i) {
        memcpy(out + (size_t)i * hidden, x + step.wanted[i] * hidden, hidden * sizeof(float));
        memcpy(kept + (size_t)i * width, attended + step.wanted[i] * width, width * sizeof(float));
      }
      x = out;
      attended = kept;
    }
    const Activations& heads = prepared(attended, rows, width, width, nullptr, type_for(*layer.out));
    timer.mark(Phase::kPrepare);
    multiply(*layer.out, heads, {Store::kAdd, Type::kF32, x, (size_t)hidden, or_null(layer.out_bias)}, scratch_);
    timer.mark(Phase::kOut);
    mlp(layer, x, rows);
  }
  const Activations& normed = prepared(x, step.wanted_count, hidden, hidden, &final_norm_, Type::kF32);
  for (int i = 0; i < step.wanted_count; ++i) memcpy(out + (size_t)i * hidden, normed.row(i), hidden * sizeof(float));
}

std::array<double, (int)Phase::kCount> Decoder::take_seconds() {
  auto taken = seconds_;
  seconds_.fill(0);
  return taken;
}

}  // namespace kllm
