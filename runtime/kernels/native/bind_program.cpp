#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/tuple.h>

#include "bindings.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmq {
void bind_program(nb::module_& module) {
  nb::enum_<Norm::Kind>(module, "NormKind")
      .value("none", Norm::Kind::none)
      .value("rms", Norm::Kind::rms)
      .value("layer", Norm::Kind::layer);
  nb::class_<Norm>(module, "Norm", "Borrows float32 weight and bias, [size].")
      .def(nb::init<>(), "No norm.")
      .def(
          "__init__",
          [](Norm* self, Norm::Kind kind, int64_t size, float eps, uintptr_t weight, uintptr_t bias) {
            new (self) Norm{kind, size, eps, pointer<float>(weight), pointer<float>(bias)};
          },
          "kind"_a, "size"_a, "eps"_a, "weight"_a, "bias"_a = 0);
  nb::enum_<ActivationFunction>(module, "ActivationFunction")
      .value("silu", ActivationFunction::silu)
      .value("gelu", ActivationFunction::gelu)
      .value("gelu_tanh", ActivationFunction::gelu_tanh)
      .value("relu", ActivationFunction::relu);

  nb::class_<Program>(module, "Program", "A decoder as operations over buffers of activations; see program.h.")
      .def(nb::init<>())
      .def("add_buffer", &Program::add_buffer, "width"_a)
      .def(
          "add_embed",
          [](Program& self, uintptr_t embedding, int64_t size, float scale, int out) {
            self.add_embed(pointer<uint16_t>(embedding), size, scale, out);
          },
          "embedding"_a, "size"_a, "scale"_a, "out"_a)
      .def(
          "add_linear",
          [](Program& self, const PackedWeight* weight, Activations::Mode mode, float input_scale, int in, int out,
             int64_t column) { self.add_linear(weight, {mode, input_scale}, in, out, column);
          },
          "weight"_a, "activations"_a, "input_scale"_a, "input"_a, "out"_a, "column"_a = 0, nb::keep_alive<1, 2>())
      .def(
          "add_residual",
          [](Program& self, int64_t size, const Norm& after, float scale, const Norm& before, int x, int y, int out) {
            self.add_residual({size, {}, {}, after, scale, before, {}}, x, y, out);
          },
          "size"_a, "after"_a, "scale"_a, "before"_a, "x"_a, "y"_a, "out"_a)
      .def("add_activate", &Program::add_activate, "function"_a, "gated"_a, "size"_a, "input"_a, "out"_a)
      .def(
          "add_experts",
          [](Program& self, const std::vector<std::tuple<const PackedWeight*, Activations::Mode, float>>& wides,
             const std::vector<std::tuple<const PackedWeight*, Activations::Mode, float>>& outs, int per_token,
             bool renormalize, ActivationFunction function, bool gated, int64_t size, int in, int logits, int out) {
            std::vector<Expert> experts;
            for (size_t index = 0; index < wides.size(); index++) {
              const auto& [wide, wide_mode, wide_scale] = wides[index];
              const auto& [last, last_mode, last_scale] = outs[index];
              experts.push_back({{wide, {wide_mode, wide_scale}}, {last, {last_mode, last_scale}}});
            }
            self.add_experts(Experts(std::move(experts), per_token, renormalize, function, gated, size), in, logits,
                             out);
          },
          "wides"_a, "outs"_a, "per_token"_a, "renormalize"_a, "function"_a, "gated"_a, "size"_a, "input"_a,
          "logits"_a, "out"_a, "Borrows the weights: (weight, activations, input_scale) of each expert.")
      .def(
          "add_qkv",
          [](Program& self, int num_heads, const Norm& q_norm, const Norm& k_norm, uintptr_t cos, uintptr_t sin,
             int half, const KVPlane& keys, const KVPlane& values, int group, int qkv) {
            self.add_qkv({{}, num_heads, keys.num_kv_heads, keys.head_dim, values.head_dim, q_norm, k_norm,
                          pointer<float>(cos), pointer<float>(sin), half, nullptr, nullptr, nullptr, keys, values},
                         group, qkv);
          },
          "num_heads"_a, "q_norm"_a, "k_norm"_a, "cos"_a, "sin"_a, "half"_a, "keys"_a, "values"_a, "group"_a, "qkv"_a)
      .def(
          "add_attention",
          [](Program& self, int num_heads, float scale, float softcap, const KVPlane& keys, const KVPlane& values,
             int group, int qkv, int out) {
            self.add_attention({nullptr, nullptr, 0, 0, false, num_heads, scale, softcap, keys, values}, group, qkv,
                               out);
          },
          "num_heads"_a, "scale"_a, "softcap"_a, "keys"_a, "values"_a, "group"_a, "qkv"_a, "out"_a)
      .def("start_timing", &Program::start_timing, "From here on runs are timed, operation by operation.")
      .def(
          "times",
          [](const Program& self) {
            std::vector<std::pair<std::string, double>> result;
            for (const auto& [operation, seconds] : self.times()) result.emplace_back(operation, seconds);
            return result;
          },
          "(operation, seconds) of each, in their order: of the runs since start_timing the fastest.")
      .def(
          "run",
          [](Program& self, int64_t num_tokens, uintptr_t token_ids, uintptr_t positions,
             const std::vector<std::tuple<AttentionPlan*, uintptr_t, uintptr_t>>& groups, int result, uintptr_t out) {
            Step step{num_tokens, pointer<int64_t>(token_ids), pointer<int64_t>(positions), {}};
            for (const auto& [plan, block, offset] : groups) {
              step.groups.push_back({plan, pointer<int64_t>(block), pointer<int64_t>(offset)});
            }
            nb::gil_scoped_release release;
            self.run(step, result, pointer<uint16_t>(out));
          },
          "num_tokens"_a, "token_ids"_a, "positions"_a, "groups"_a, "result"_a, "out"_a);
}

}  // namespace llmq
