#include "bindings.h"
#include "linear.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmq {

void bind_linear(nb::module_& module) {
  nb::enum_<Numbers>(module, "Numbers")
      .value("bf16", Numbers::bf16)
      .value("int8", Numbers::int8)
      .value("int4", Numbers::int4)
      .value("int3", Numbers::int3)
      .value("fp8", Numbers::fp8);
  nb::enum_<Scales>(module, "Scales")
      .value("none", Scales::none)
      .value("bf16", Scales::bf16)
      .value("fp16", Scales::fp16)
      .value("fp32", Scales::fp32)
      .value("int8", Scales::int8);
  nb::enum_<Activations::Mode>(module, "Activations")
      .value("exact", Activations::Mode::exact)
      .value("int8_group", Activations::Mode::int8_group)
      .value("int8_row", Activations::Mode::int8_row)
      .value("fp8_group", Activations::Mode::fp8_group)
      .value("fp8_row", Activations::Mode::fp8_row);

  nb::class_<PackedWeight>(module, "PackedWeight", "A linear's weight as the kernels read it; borrows its tensors.")
      .def(
          "__init__",
          [](PackedWeight* self, Numbers numbers_type, Scales scales_type, int64_t out_features, int64_t in_features,
             int64_t group_size, uintptr_t numbers, uintptr_t scales, uintptr_t zeros, uintptr_t offsets,
             uintptr_t bias, uintptr_t column_order, int outer_shift, uintptr_t outer_scales, uintptr_t outer_offsets) {
            new (self) PackedWeight{numbers_type,
                                    scales_type,
                                    out_features,
                                    in_features,
                                    group_size,
                                    pointer<uint8_t>(numbers),
                                    pointer<void>(scales),
                                    pointer<uint8_t>(zeros),
                                    pointer<void>(offsets),
                                    pointer<float>(bias),
                                    pointer<int32_t>(column_order),
                                    outer_shift,
                                    pointer<uint16_t>(outer_scales),
                                    pointer<uint16_t>(outer_offsets)};
          },
          "numbers_type"_a, "scales_type"_a, "out_features"_a, "in_features"_a, "group_size"_a, "numbers"_a,
          "scales"_a = 0, "zeros"_a = 0, "offsets"_a = 0, "bias"_a = 0, "column_order"_a = 0, "outer_shift"_a = 0,
          "outer_scales"_a = 0, "outer_offsets"_a = 0)
      .def_ro("out_features", &PackedWeight::out_features)
      .def_ro("in_features", &PackedWeight::in_features)
      .def_ro("group_size", &PackedWeight::group_size);

  module.def(
      "packed_bytes",
      [](Numbers type, int64_t out_features, int64_t in_features) {
        const PackedWeight shape{type, Scales::none, out_features, in_features, in_features, nullptr};
        return shape.num_blocks() * shape.block_bytes();
      },
      "type"_a, "out_features"_a, "in_features"_a, "Bytes that pack_numbers writes.");
  module.def(
      "pack_numbers",
      [](Numbers type, uintptr_t rows, int64_t out_features, int64_t in_features, uintptr_t packed) {
        nb::gil_scoped_release release;
        pack_numbers(type, pointer<void>(rows), out_features, in_features, pointer<uint8_t>(packed));
      },
      "type"_a, "rows"_a, "out_features"_a, "in_features"_a, "packed"_a);
  module.def(
      "pack_groups",
      [](int element_bytes, uintptr_t rows, int64_t out_features, int64_t groups, uintptr_t packed) {
        pack_groups(element_bytes, pointer<void>(rows), out_features, groups, pointer<void>(packed));
      },
      "element_bytes"_a, "rows"_a, "out_features"_a, "groups"_a, "packed"_a);
  module.def(
      "linear",
      [](const PackedWeight& weight, Activations::Mode mode, float input_scale, uintptr_t x, int64_t num_rows,
         int64_t x_stride, uintptr_t y, int64_t y_stride, bool is_fp32) {
        nb::gil_scoped_release release;
        linear(weight, {mode, input_scale}, pointer<uint16_t>(x), num_rows, x_stride, pointer<void>(y), y_stride,
               is_fp32 ? Output::fp32 : Output::bf16);
      },
      "weight"_a, "activations"_a, "input_scale"_a, "x"_a, "num_rows"_a, "x_stride"_a, "y"_a, "y_stride"_a,
      "is_fp32"_a, "y = x W^T + bias: bf16 [num_rows, in_features] -> bf16 or fp32 [num_rows, out_features].");
}

}  // namespace llmq
