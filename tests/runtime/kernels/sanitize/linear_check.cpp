// Products of every kind over shapes with tails, on memory of exactly the size that the layout says. What they compute is
// checked in Python; here, what they touch.

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

void product(Numbers type, bool has_zeros, bool has_order, Activations::Mode mode, int64_t rows, int64_t out, int64_t in,
             int64_t group_size) {
  const int bytes = type == Numbers::bf16 ? 2 : 1;
  std::vector<uint8_t> numbers(out * in * bytes);
  for (auto& number : numbers) number = type == Numbers::int4 ? random_below(16) : random_below(64);
  PackedWeight w{type, type == Numbers::bf16 ? Scales::none : Scales::bf16, out, in, group_size, nullptr};
  std::unique_ptr<uint8_t[]> packed(new uint8_t[w.num_blocks() * w.block_bytes()]);
  pack_numbers(type, numbers.data(), out, in, packed.get());
  w.numbers = packed.get();
  const int64_t of_groups = w.num_blocks() * w.num_groups() * kLane;
  std::vector<uint16_t> scales(of_groups, 0x3c00);
  std::vector<uint8_t> zeros(of_groups, 7);
  std::vector<float> bias(out, 1.0f);
  std::vector<int32_t> order(in);
  for (int64_t k = 0; k < in; k++) order[k] = static_cast<int32_t>(in - 1 - k);
  if (type != Numbers::bf16) w.scales = scales.data();
  if (has_zeros) w.zeros = zeros.data();
  if (has_order) w.column_order = order.data();
  w.bias = bias.data();
  std::vector<uint16_t> x(rows * in), y(rows * out);
  for (auto& number : x) number = static_cast<uint16_t>(0x3f00 + random_below(128));
  linear(w, {mode, 0}, x.data(), rows, in, y.data(), out, Output::bf16);
  std::vector<float> z(rows * out);
  linear(w, {mode, 0}, x.data(), rows, in, z.data(), out, Output::fp32);
}

}  // namespace

int main() {
  thread_pool().resize(3);
  for (Isa one : {Isa::avx2, Isa::avx512_vnni, Isa::avx512_bf16}) {
    if (one > native_isa()) continue;
    force_isa(one);
    for (int turn = 0; turn < 60; turn++) {
      const int64_t rows = turn < 20 ? 1 + turn : 1 + random_below(150), out = 1 + random_below(100);
      const int64_t in = 1 + random_below(600), group_size = 16 << random_below(4);
      for (Numbers type : {Numbers::bf16, Numbers::int8, Numbers::int4}) {
        const bool is_bf16 = type == Numbers::bf16;
        const bool is_channel = is_bf16 || random_below(3) == 0;
        const bool has_zeros = !is_bf16 && random_below(2), has_order = !is_bf16 && random_below(2);
        for (auto mode : {Activations::Mode::exact, Activations::Mode::int8_group, Activations::Mode::int8_row}) {
          if (is_bf16 && mode != Activations::Mode::exact) continue;
          product(type, has_zeros, has_order, mode, rows, out, in, is_channel ? in : group_size);
        }
      }
    }
    std::printf("%s ok\n", name_of(one));
  }
}
