// Python's view of the extension. Tensors come as addresses (their owner keeps them alive during the call) with shapes
// beside them; small vectors of weights come as arrays and are copied. The interpreter lock is released while it computes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "ceilings.h"
#include "decoder.h"
#include "half.h"
#include "machine.h"

namespace nb = nanobind;
using namespace kllm;
using namespace nb::literals;

namespace {

using Address = uintptr_t;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MaybeFloats = std::optional<Floats>;

Type type_named(const std::string& name) {
  if (name == "float32") return Type::kF32;
  if (name == "bfloat16") return Type::kBF16;
  if (name == "int8") return Type::kI8;
  throw std::invalid_argument("unknown type " + name);
}

Vector copied(const MaybeFloats& values) {
  return values ? Vector(values->data(), values->data() + values->size()) : Vector();
}

// The threads serve one call at a time: two models in a process take turns.
std::mutex in_use;

// Lets other Python threads run, then waits for the native threads.
struct Turn {
  nb::gil_scoped_release release;
  std::lock_guard<std::mutex> lock{in_use};
};

void read_rows(const Matrix& matrix, Address indices, int count, Address out) {
  Turn turn;
  const int64_t* rows = (const int64_t*)indices;
  for (int i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= matrix.rows) throw std::out_of_range("row index outside the matrix");
  pool().run((count + 7) / 8, [&](int task, int) {
    for (int i = task * 8; i < std::min(task * 8 + 8, count); ++i)
      matrix.read_row((int)rows[i], (float*)out + (size_t)i * matrix.cols);
  });
}

// y [rows, matrix rows] = x [rows, cols] matrix^T + bias. `product`: what x is turned into first.
void linear(const Matrix& matrix, Address x, int rows, const std::string& product, Address y, const std::string& y_type,
            Address bias) {
  Turn turn;
  static thread_local ActivationBuffer activations;
  static thread_local Scratch scratch;
  scratch.reserve(pool().threads(), product_scratch(matrix));
  const Activations& ready = activations.shape(activation_type(matrix, type_named(product)), rows, matrix.cols);
  prepare((const float*)x, matrix.cols, nullptr, 0, ready);
  multiply(matrix, ready, {Store::kSet, type_named(y_type), (void*)y, (size_t)matrix.rows, (const float*)bias}, scratch);
}

// q, out float [tokens, heads, head_dim]; spans int64 [rows, 3]; see AttentionTask for the rest.
void attention(Address q, Address out, Address k_cache, Address v_cache, Address k_scales, Address v_scales,
               const std::string& cache_type, Address tables, int table_width, Address spans, int rows, int block_tokens,
               int heads, int kv_heads, int head_dim, float scale, bool exact) {
  Turn turn;
  static thread_local Scratch scratch;
  AttentionTask task{};
  task.q = (const float*)q;
  task.out = (float*)out;
  task.q_stride = task.out_stride = (size_t)heads * head_dim;
  task.k_cache = (const void*)k_cache;
  task.v_cache = (const void*)v_cache;
  task.k_scales = (const float*)k_scales;
  task.v_scales = (const float*)v_scales;
  task.cache_type = type_named(cache_type);
  task.block_tokens = block_tokens;
  task.heads = heads;
  task.kv_heads = kv_heads;
  task.head_dim = head_dim;
  task.scale = scale;
  task.exact = exact;
  scratch.reserve(pool().threads(), kernels().attention_scratch(heads / kv_heads, head_dim, task.cache_type));
  AttentionPlan plan;
  plan.all_tokens((const Span*)spans, rows, kv_heads);
  plan.run(task, (const int64_t*)tables, table_width, scratch);
}

void add_layer(Decoder& decoder, Floats attention_norm, MatrixPtr qkv, MaybeFloats qkv_bias, MaybeFloats q_norm,
               MaybeFloats k_norm, MatrixPtr out, MaybeFloats out_bias, Floats mlp_norm, MatrixPtr gate_up,
               MaybeFloats gate_up_bias, MatrixPtr down, MaybeFloats down_bias) {
  DecoderLayer layer;
  layer.attention_norm = copied(attention_norm);
  layer.mlp_norm = copied(mlp_norm);
  layer.q_norm = copied(q_norm);
  layer.k_norm = copied(k_norm);
  layer.qkv_bias = copied(qkv_bias);
  layer.out_bias = copied(out_bias);
  layer.gate_up_bias = copied(gate_up_bias);
  layer.down_bias = copied(down_bias);
  layer.qkv = std::move(qkv);
  layer.out = std::move(out);
  layer.gate_up = std::move(gate_up);
  layer.down = std::move(down);
  decoder.add_layer(std::move(layer));
}

void forward(Decoder& decoder, Address x, int tokens, Address positions, Address slots, Address tables, int table_width,
             Address spans, int rows, Address wanted, int wanted_count, int block_tokens, const std::string& cache_type,
             Address caches, Address out) {
  Turn turn;
  const Step step{tokens, (const int64_t*)positions, (const int64_t*)slots, (const int64_t*)tables, table_width,
                  (const Span*)spans, rows, (const int64_t*)wanted, wanted_count, block_tokens, type_named(cache_type)};
  decoder.forward((float*)x, step, (const LayerCache*)caches, (float*)out);
}

nb::dict take_seconds(Decoder& decoder) {
  static const char* const names[] = {"prepare", "qkv", "rotate", "attention", "out", "gate_up", "down"};
  const auto seconds = decoder.take_seconds();
  nb::dict result;
  for (size_t i = 0; i < seconds.size(); ++i) result[names[i]] = seconds[i];
  return result;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a model may live until the process ends
  m.doc() = "Native CPU kernels; see native/ in the sources.";
  m.def("instruction_sets", &instruction_sets, "Those this processor has, best first.");
  m.def("instruction_set", [] { return std::string(kernels().name); }, "The one in use.");
  m.def("use_instruction_set", &use_instruction_set, "name"_a, nb::call_guard<Turn>());
  m.def("use_threads", &use_threads, "threads"_a, "spin_us"_a, "cpus"_a, nb::call_guard<Turn>());
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("threads", [] { return pool().threads(); });
  m.def("read_bandwidth", &read_bandwidth, "bytes"_a, "threads"_a, "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
        "GB/s of `threads` threads reading a buffer over and over.");
  m.def("dot_rate", [](const std::string& kind, int threads, double seconds) {
    nb::gil_scoped_release release;
    return dot_rate(kind.c_str(), threads, seconds);
  }, "kind"_a, "threads"_a, "seconds"_a, "GFLOP/s (fp32, bf16) or GOP/s (int8) from registers.");
  m.def("dot_instructions", [](const std::string& kind) { return std::string(dot_instructions(kind.c_str())); }, "kind"_a,
        "What dot_rate multiplies with; empty when this processor has nothing for the kind.");

  m.def("dot_instructions", [](const std::string& kind) { return std::string(dot_instructions(kind.c_str())); }, "kind"_a);

  nb::class_<Arena>(m, "Arena", "Memory of many matrices.").def(nb::init<>()).def_prop_ro("nbytes", &Arena::bytes);

  nb::class_<Matrix>(m, "Matrix", "Packed weights [rows, cols]; see native/matrix.h for the layouts.")
      .def("__init__",
           [](Matrix* self, std::shared_ptr<Arena> arena, const std::string& format, int rows, int cols, bool gated) {
             new (self) Matrix(std::move(arena), format_named(format.c_str()), rows, cols, gated);
           },
           "arena"_a, "format"_a, "rows"_a, "cols"_a, "gated"_a = false)
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols)
      .def_ro("gated", &Matrix::gated)
      .def_prop_ro("format", [](const Matrix& self) { return std::string(name_of(self.format)); })
      .def_prop_ro("nbytes", [](const Matrix& self) { return self.panel_bytes * self.panels; })
      .def("fill", [](Matrix& self, int first, int count, Address values) {
        nb::gil_scoped_release release;
        self.fill(first, count, (const float*)values);
      }, "first"_a, "count"_a, "values"_a, "Rows from float32 [count, cols].")
      .def("fill_bf16", [](Matrix& self, int first, int count, Address values) {
        nb::gil_scoped_release release;
        self.fill_bf16(first, count, (const uint16_t*)values);
      }, "first"_a, "count"_a, "values"_a)
      .def("fill_int8", [](Matrix& self, int first, int count, Address values, Address scales) {
        nb::gil_scoped_release release;
        self.fill_int8(first, count, (const int8_t*)values, (const float*)scales);
      }, "first"_a, "count"_a, "values"_a, "scales"_a)
      .def("fill_blocks", [](Matrix& self, int first, int count, Address blocks) {
        nb::gil_scoped_release release;
        self.fill_blocks(first, count, (const uint8_t*)blocks);
      }, "first"_a, "count"_a, "blocks"_a, "Rows from the blocks of a GGUF tensor of this format.")
      .def("read_rows", &read_rows, "indices"_a, "count"_a, "out"_a, "int64 indices to float32 [count, cols].");

  m.def("linear", &linear, "matrix"_a, "x"_a, "rows"_a, "product"_a, "y"_a, "y_type"_a, "bias"_a);
  m.def("attention", &attention, "q"_a, "out"_a, "k_cache"_a, "v_cache"_a, "k_scales"_a, "v_scales"_a, "cache_type"_a,
        "tables"_a, "table_width"_a, "spans"_a, "rows"_a, "block_tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a,
        "exact"_a);

  nb::class_<Decoder>(m, "Decoder", "All layers of a dense decoder; see native/decoder.h.")
      .def("__init__",
           [](Decoder* self, int hidden, int heads, int kv_heads, int head_dim, float eps, const std::string& product,
              bool int8_products, FloatTable cos, FloatTable sin, Floats final_norm) {
             if (sin.shape(0) != cos.shape(0) || (int)final_norm.size() != hidden)
               throw std::invalid_argument("the tables of a decoder do not fit it");
             new (self) Decoder({hidden, heads, kv_heads, head_dim, eps, type_named(product), int8_products}, cos.data(),
                                sin.data(), (int)cos.shape(0), final_norm.data());
           },
           "hidden"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "eps"_a, "product"_a, "int8_products"_a, "cos"_a, "sin"_a,
           "final_norm"_a)
      .def("add_layer", &add_layer, "attention_norm"_a, "qkv"_a, "qkv_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(),
           "out"_a, "out_bias"_a.none(), "mlp_norm"_a, "gate_up"_a, "gate_up_bias"_a.none(), "down"_a, "down_bias"_a.none())
      .def("forward", &forward)
      .def_rw("timing", &Decoder::timing)
      .def("take_seconds", &take_seconds, "Seconds by phase since the last call, while `timing` is set.");
}
