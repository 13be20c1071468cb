// Products of every kind over shapes with tails, on memory of exactly the size that the layout says. What they compute
// is checked in Python; here, what they touch.

#include <cstdio>
#include <memory>
#include <vector>

#include "cpu.h"
#include "linear.h"
#include "pack.h"
#include "pool.h"

using namespace llmq;

namespace {

unsigned state = 1;
unsigned random_below(unsigned n) {
  state = state * 1664525 + 1013904223;
  return (state >> 8) % n;
}

enum class Correction { none, zeros, offsets };

void product(Numbers type, Scales scales_type, Correction correction, bool has_order, Activations activations,
             int64_t rows, int64_t out, int64_t in, int64_t group_size) {
  const int bytes = type == Numbers::bf16 ? 2 : 1;
  std::vector<uint8_t> numbers(out * in * bytes);
  for (auto& number : numbers) {
    number = random_below(type == Numbers::int3 ? 8 : type == Numbers::int4 ? 16 : type == Numbers::fp8 ? 256 : 64);
    if (type == Numbers::fp8 && (number & 0x7f) == 0x7f) number = 0;  // a NaN
  }
  PackedWeight w{type, scales_type, out, in, group_size, nullptr};
  std::unique_ptr<uint8_t[]> packed(new uint8_t[w.num_blocks() * w.block_bytes()]);
  pack_numbers(type, numbers.data(), out, in, packed.get());
  w.numbers = packed.get();
  const int64_t of_groups = w.num_blocks() * w.num_groups() * kLane;
  const int64_t scale_bytes = scales_type == Scales::fp32 ? 4 : scales_type == Scales::int8 ? 1 : 2;
  while (scales_type == Scales::int8 && w.outer_shift < 3 && w.num_groups() % (2 << w.outer_shift) == 0) w.outer_shift++;
  std::vector<uint16_t> outer(of_groups >> w.outer_shift, 0x3c00);
  std::vector<uint8_t> scales(of_groups * scale_bytes, 0x3c), offsets(of_groups * scale_bytes, 0x3d);
  std::vector<uint8_t> zeros(of_groups, 7);
  std::vector<float> bias(out, 1.0f);
  std::vector<int32_t> order(in);
  for (int64_t k = 0; k < in; k++) order[k] = static_cast<int32_t>(in - 1 - k);
  if (scales_type != Scales::none) w.scales = scales.data();
  if (correction == Correction::zeros) w.zeros = zeros.data();
  if (correction == Correction::offsets) w.offsets = offsets.data();
  if (scales_type == Scales::int8) w.outer_scales = outer.data();
  if (scales_type == Scales::int8 && w.offsets) w.outer_offsets = outer.data();
  if (has_order) w.column_order = order.data();
  w.bias = bias.data();
  std::vector<uint16_t> x(rows * in), y(rows * out);
  for (auto& number : x) number = static_cast<uint16_t>(0x3f00 + random_below(128));
  linear(w, activations, x.data(), rows, in, y.data(), out, Output::bf16);
  std::vector<float> z(rows * out);
  linear(w, activations, x.data(), rows, in, z.data(), out, Output::fp32);
}

}  // namespace

int main() {
  thread_pool().resize(3);
  for (Isa one : {Isa::avx2, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx, Isa::amx_emulated}) {
    if (!runs_here(one)) continue;
    force_isa(one);
    using Mode = Activations::Mode;
    for (int turn = 0; turn < 60; turn++) {
      const int64_t rows = turn < 20 ? 1 + turn : 1 + random_below(turn % 10 == 0 ? 400 : 150);
      const int64_t out = 1 + random_below(100), in = 1 + random_below(turn % 4 == 0 ? 2500 : 600);
      const int64_t group_size = random_below(2) ? 16 << random_below(4) : 8 * (1 + random_below(90));
      for (Numbers type : {Numbers::bf16, Numbers::int8, Numbers::int4, Numbers::int3, Numbers::fp8}) {
        const bool is_bf16 = type == Numbers::bf16, is_fp8 = type == Numbers::fp8;
        const bool is_channel = is_bf16 || random_below(3) == 0;
        const bool has_order = !is_bf16 && random_below(2);
        const auto scales = is_bf16 ? Scales::none : static_cast<Scales>(1 + random_below(4));
        const auto correction = is_bf16 || is_fp8 ? Correction::none : static_cast<Correction>(random_below(3));
        for (Mode mode : {Mode::exact, Mode::int8_group, Mode::int8_row, Mode::fp8_group, Mode::fp8_row}) {
          const bool is_of_fp8 = mode == Mode::fp8_group || mode == Mode::fp8_row;
          if (mode != Mode::exact && (is_bf16 || is_of_fp8 != is_fp8)) continue;
          const bool has_input_scale = (mode == Mode::int8_row || mode == Mode::fp8_row) && random_below(2);
          product(type, scales, correction, has_order, {mode, has_input_scale ? 0.01f : 0.0f}, rows, out, in,
                  is_channel ? in : group_size);
        }
      }
    }
    std::printf("%s ok\n", name_of(one));
  }
}
