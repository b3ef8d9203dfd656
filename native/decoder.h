// All layers of a dense decoder (llama and its relatives) in one call: no Python between the first layer and the last.
//
//   x += out( attention( rotate( qkv( norm(x) ) ) ) )         the residual stream x is float32
//   x += down( silu(gate) * up ),  gate, up = gate_up( norm(x) )
//
// The last layer computes only the tokens whose hidden states are wanted; for the others it writes K and V.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "product.h"

namespace kllm {

using MatrixPtr = std::shared_ptr<Matrix>;
using Vector = std::vector<float>;  // empty: not there

struct DecoderShape {
  int hidden, heads, kv_heads, head_dim;
  float eps;
  Type product;        // activations of float matrices: kF32 or kBF16
  bool int8_products;  // quantised matrices meet int8 activations, an int8 cache q and probabilities of one byte
};

struct DecoderLayer {
  Vector attention_norm, mlp_norm, q_norm, k_norm;
  Vector qkv_bias, out_bias, gate_up_bias, down_bias;
  MatrixPtr qkv, out, gate_up, down;
};

struct LayerCache {
  void* k;
  void* v;
  float* k_scales;
  float* v_scales;
};

// One step. positions, slots [tokens]; tables [rows, table_width]; spans [rows]; wanted [wanted_count], ascending.
struct Step {
  int tokens;
  const int64_t* positions;
  const int64_t* slots;
  const int64_t* tables;
  int table_width;
  const Span* spans;
  int rows;
  const int64_t* wanted;
  int wanted_count;
  int block_tokens;
  Type cache_type;
};

enum class Phase { kPrepare, kQkv, kRotate, kAttention, kOut, kGateUp, kDown, kCount };

class Decoder {
 public:
  // cos, sin: [positions, head_dim]; final_norm [hidden]; copied.
  Decoder(DecoderShape shape, const float* cos, const float* sin, int positions, const float* final_norm);

  void add_layer(DecoderLayer layer);
  int layers() const { return (int)layers_.size(); }

  // x [tokens, hidden]: embeddings, overwritten. out [wanted_count, hidden]: the residual stream after the last layer
  // and the final norm. caches: one per layer.
  void forward(float* x, const Step& step, const LayerCache* caches, float* out);

  // Seconds spent in each phase since the last call, if timing is on.
  std::array<double, (int)Phase::kCount> take_seconds();
  bool timing = false;

 private:
  class Timer;
  Type type_for(const Matrix& matrix) const;
  const Activations& prepared(const float* x, int rows, int cols, size_t stride, const Vector* norm, Type type);
  AttentionTask attention_over(const Step& step, const LayerCache& cache, float* out);
  void rotate(const Step& step, const LayerCache& cache, const DecoderLayer& layer);
  void mlp(const DecoderLayer& layer, float* x, int rows);

  DecoderShape shape_;
  std::vector<DecoderLayer> layers_;
  Vector cos_, sin_, final_norm_;
  size_t product_scratch_ = 0;
  Scratch scratch_;
  ActivationBuffer activations_, inner_activations_;
  Buffer qkv_, attended_, inner_, wanted_attended_;
  AttentionPlan attention_, wanted_attention_;
  std::array<double, (int)Phase::kCount> seconds_{};
};

}  // namespace kllm
