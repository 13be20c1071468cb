// linear() by the vectors of one instruction set.
//
// Few rows go straight through the packed lines, several blocks of outputs at once; some more in one or two tiles,
// block by block. Many rows share what unpacking costs: some blocks' lines are unpacked for a stretch of the input that
// stays in the second-level cache, and tiles of rows go through it. All form each output in the same order, so that a
// row's numbers do not depend on its neighbours.

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "inline.h"
#include "linear.h"
#include "pool.h"
#include "scratch.h"

namespace llmq::LLMQ_ISA {
namespace {

#ifdef __AVX512F__
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

// std::min and the like may not be inlined, and then be of any object file.
LLMQ_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
LLMQ_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

constexpr bool kPairsAreBf16 = kPairsOfStep * sizeof(InputPair) == 16;  // 8 inputs; else floats
constexpr int kFewRows = 4;
constexpr int64_t kStretch = 512;    // of the input that is unpacked at once
constexpr int64_t kRowsOfTask = 192;  // that share it
// Lines are fetched while those of the blocks before are worked on, or where these are long a little ahead of their own.
// Few rows fetch into the second-level cache, many into the first.
constexpr int64_t kPrefetchMost = 128 << 10, kPrefetchMostOfFewRows = 448 << 10, kPrefetchAhead = 2048;

// Tiles that unpack a weight each for itself, where kDirectTileRows fit the registers: fewer, the more that takes.
constexpr int64_t direct_tiles(Numbers numbers) {
  if (numbers == Numbers::fp8) return 1;
  return numbers == Numbers::bf16 || numbers == Numbers::int8 ? kMostDirectTiles : 2;
}

constexpr int64_t line_bytes(Numbers numbers) { return bits_of(numbers) * kLane; }  // of 8 inputs and kLane outputs

// ---- The input, made ready

// Exact: pairs of inputs, times places_of_inputs, and where has_corrections the sum of each group.
struct ExactInput {
  using Item = InputPair;
  static constexpr int kItemsOfStep = kPairsOfStep;  // of 8 inputs
  const InputPair* items;
  int64_t stride;
  const float* sums;  // [rows][groups]
};

// Pairs as well, of which a scale is taken out: x is, or is about, scale * q. What fp8 weights multiply.
struct ScaledInput {
  using Item = InputPair;
  static constexpr int kItemsOfStep = kPairsOfStep;
  const InputPair* items;
  int64_t stride;
  const float* scales;  // [rows][groups]
  const float* sums;    // none: fp8 is symmetric
};

// Rounded: four int8 or two int16 an item. x is about scale * q.
template <class NumberType, class ItemType>
struct Rounded {
  using Number = NumberType;
  using Item = ItemType;
  static constexpr int kItemsOfStep = 8 * sizeof(Number) / sizeof(Item);
  const Item* items;
  int64_t stride;
  const float* sums;     // [rows][groups], scale * (sum of q)
  const float* scales;   // [rows][groups]
  const int32_t* starts;  // [rows][groups], -(sum of q) * (zero of a symmetric weight): what a sum of u * q begins with
};
using RoundedInput = Rounded<int8_t, int32_t>;
#ifdef LLMQ_SUMS_IN_WORDS
using RoundedWords = Rounded<int16_t, InputWords>;
using RoundedInt8 = RoundedWords;  // of int8 weights
#else
using RoundedInt8 = RoundedInput;
#endif

// What is taken off u before it is multiplied.
template <class Input>
LLMQ_INLINE int center_of(const PackedWeight& w) {
  return std::is_same_v<Input, ExactInput> ? exact_center(w.numbers_type, w.center()) : w.center();
}
// Whether the sum of a group's inputs is needed.
template <class Input>
bool has_corrections(const PackedWeight& w) {
  return w.zeros || w.offsets || center_of<Input>(w) != w.center();
}

struct Rows {
  const uint16_t* x;
  int64_t stride;
};

// Elements from row to row of `count`: an odd number of cache lines, so that a tile of rows does not fall into one set
// of the first-level cache.
template <class Item>
constexpr int64_t padded_stride(int64_t count) {
  constexpr int64_t kItems = 64 / sizeof(Item);
  return ((count + kItems - 1) / kItems | 1) * kItems;
}
// Whether rows do: there are 64 sets of 8 lines.
constexpr bool share_a_set(int64_t stride_bytes) { return stride_bytes % 2048 == 0; }

// x in the order of the weight's columns, filled up with zeros, as floats.
void gather(const PackedWeight& w, const uint16_t* x, float* to) {
  int64_t k = 0;
  if (!w.column_order) {
    for (; k + kLane <= w.in_features; k += kLane) store_floats(to + k, load_bf16(x + k));
  }
  for (; k < w.in_features; k++) {
    const uint32_t bits = uint32_t{x[w.column_order ? w.column_order[k] : k]} << 16;
    memcpy(to + k, &bits, 4);
  }
  for (; k < w.padded_in() + kLane; k++) to[k] = 0;
}

float sum(const float* x, int64_t count) {
  Floats total = zero_floats();
  int64_t k = 0;
  for (; k + kLane <= count; k += kLane) total = add(total, load_floats(x + k));
  float rest = 0;
  for (; k < count; k++) rest += x[k];
  return sum_of(total) + rest;
}

void store_items(const float* x, int64_t count, InputPair* items) {
  if (!kPairsAreBf16) {
    memcpy(items, x, count * sizeof(float));
    return;
  }
  auto* halves = reinterpret_cast<uint16_t*>(items);
  for (int64_t k = 0; k < count; k += 8) {
    uint16_t sixteen[kLane];
    store_bf16(sixteen, load_floats(x + k));
    memcpy(halves + k, sixteen, 16);
  }
}

void sum_groups(const PackedWeight& w, const float* x, float* sums) {
  for (int64_t g = 0; g < w.num_groups(); g++) {
    const int64_t first = g * w.group_size, end = min(first + w.group_size, w.in_features);
    sums[g] = sum(x + first, end - first);
  }
}

// x times places_of_inputs. Beyond `count` there is room for a vector.
void scale_inputs(Numbers numbers, float* x, int64_t count) {
  const float* places = places_of_inputs(numbers);
  if (!places) return;
  const Floats factors = load_floats(places);
  for (int64_t k = 0; k < count; k += kLane) store_floats(x + k, multiply(load_floats(x + k), factors));
}

void prepare_row(const PackedWeight& w, float* x, InputPair* items, float* sums) {
  if (sums) sum_groups(w, x, sums);
  scale_inputs(w.numbers_type, x, w.padded_in());
  store_items(x, w.padded_in(), items);
}

// max|x|, or at least 1e-12; NaN where one of x is, so that what it scales is too.
float largest(const float* x, int64_t count) {
  Floats most = broadcast(1e-12f);
  int64_t k = 0;
  for (; k + kLane <= count; k += kLane) most = maximum_or_nan(most, absolute(load_floats(x + k)));
  float result = maximum_or_nan_of(most);
  for (; k < count; k++) {
    const float one = __builtin_fabsf(x[k]);
    if (one > result || one != one) result = one;
  }
  return result;
}

template <class Number>
void prepare_row(const PackedWeight& w, Activations activations, const float* x, Number* q, float* sums, float* scales,
                 int32_t* starts) {
  const int32_t center = w.center();
  const int64_t groups = w.num_groups();
  const bool by_group = activations.mode == Activations::Mode::int8_group;
  float scale = activations.input_scale;
  if (!by_group && scale == 0) scale = largest(x, w.in_features) / 127.5f;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = g * w.group_size, end = g + 1 == groups ? w.padded_in() : first + w.group_size;
    float most = 0;
    if (by_group) {
      most = largest(x + first, end - first);
      scale = most / 127;
    }
    // A checkpoint's own rounding is by division; a product costs a tenth of it.
    const Floats divisor = broadcast(scale), factor = broadcast(by_group ? 127 / most : 0);
    const auto rounded = [&](int64_t k, Number* to) {
      const Floats v = load_floats(x + k);
      return round_to_int8(by_group ? multiply(v, factor) : divide(v, divisor), to);
    };
    Ints sums_of_lanes = broadcast_int(0);
    int64_t k = first;
    for (; k + kLane <= end; k += kLane) sums_of_lanes = add_ints(sums_of_lanes, rounded(k, q + k));
    int32_t total = sum_of_ints(sums_of_lanes);
    if (k < end) {
      Number sixteen[kLane];
      rounded(k, sixteen);
      memcpy(q + k, sixteen, (end - k) * sizeof(Number));
      for (int64_t i = 0; i < end - k; i++) total += sixteen[i];
    }
    scales[g] = scale;
    sums[g] = scale * static_cast<float>(total);
    starts[g] = -center * total;
  }
}

// x, rounded in place. e4m3 is exact in bf16.
void prepare_row(const PackedWeight& w, Activations activations, float* x, InputPair* items, float* scales) {
  const int64_t groups = w.num_groups();
  const bool by_group = activations.mode == Activations::Mode::fp8_group;
  float scale = activations.input_scale;
  if (!by_group && scale == 0) scale = largest(x, w.in_features) / 448;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = g * w.group_size, end = g + 1 == groups ? w.padded_in() : first + w.group_size;
    if (by_group) scale = largest(x + first, end - first) / 448;
    const Floats divisor = broadcast(scale);
    // The last vector may reach into the next group, or beyond the row, where zeros are.
    for (int64_t k = first; k < end; k += kLane) {
      alignas(64) float sixteen[kLane];
      store_floats(sixteen, round_to_e4m3(divide(load_floats(x + k), divisor)));
      memcpy(x + k, sixteen, min(kLane, end - k) * sizeof(float));
    }
    scales[g] = scale;
  }
  store_items(x, w.padded_in(), items);
}

struct InputMemory {
  Scratch items, sums, scales, starts;
};

template <class Body>
void for_rows(int64_t num_rows, const Body& body) {
  if (num_rows <= kFewRows) {
    for (int64_t row = 0; row < num_rows; row++) body(row);
    return;
  }
  thread_pool().parallel_for(num_rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; row++) body(row);
  });
}

float* row_of_floats(const PackedWeight& w) {
  thread_local Scratch memory;
  return memory.get<float>(w.padded_in() + 2 * kLane);
}

ExactInput prepare_exact(const PackedWeight& w, Rows rows, int64_t num_rows, InputMemory& memory) {
  const bool needs_sums = has_corrections<ExactInput>(w);
  const bool are_apart = num_rows <= kFewRows || !share_a_set(rows.stride * 2);
  if (kPairsAreBf16 && !needs_sums && !w.column_order && w.in_features == w.padded_in() && rows.stride % 2 == 0 &&
      are_apart) {
    return {reinterpret_cast<const InputPair*>(rows.x), rows.stride / 2, nullptr};
  }
  const int64_t stride = padded_stride<InputPair>(w.padded_in() / 8 * kPairsOfStep), groups = w.num_groups();
  auto* items = memory.items.get<InputPair>(num_rows * stride);
  float* sums = needs_sums ? memory.sums.get<float>(num_rows * groups) : nullptr;
  for_rows(num_rows, [&](int64_t row) {
    float* x = row_of_floats(w);
    gather(w, rows.x + row * rows.stride, x);
    prepare_row(w, x, items + row * stride, sums ? sums + row * groups : nullptr);
  });
  return {items, stride, sums};
}

ScaledInput prepare_scaled(const PackedWeight& w, Activations activations, Rows rows, int64_t num_rows,
                           InputMemory& memory) {
  const int64_t groups = w.num_groups();
  auto* scales = memory.scales.get<float>(num_rows * groups);
  if (activations.mode == Activations::Mode::exact) {
    const ExactInput x = prepare_exact(w, rows, num_rows, memory);
    for (int64_t index = 0; index < num_rows * groups; index++) scales[index] = 1;
    return {x.items, x.stride, scales, nullptr};
  }
  const int64_t stride = padded_stride<InputPair>(w.padded_in() / 8 * kPairsOfStep);
  auto* items = memory.items.get<InputPair>(num_rows * stride);
  for_rows(num_rows, [&](int64_t row) {
    float* x = row_of_floats(w);
    gather(w, rows.x + row * rows.stride, x);
    prepare_row(w, activations, x, items + row * stride, scales + row * groups);
  });
  return {items, stride, scales, nullptr};
}

template <class Input>
Input prepare_rounded(const PackedWeight& w, Activations activations, Rows rows, int64_t num_rows, InputMemory& memory) {
  using Number = typename Input::Number;
  using Item = typename Input::Item;
  const int64_t stride = padded_stride<Item>(w.padded_in() / 8 * Input::kItemsOfStep), groups = w.num_groups();
  auto* items = memory.items.get<Item>(num_rows * stride);
  auto* sums = memory.sums.get<float>(num_rows * groups);
  auto* scales = memory.scales.get<float>(num_rows * groups);
  auto* starts = memory.starts.get<int32_t>(num_rows * groups);
  for_rows(num_rows, [&](int64_t row) {
    float* x = row_of_floats(w);
    gather(w, rows.x + row * rows.stride, x);
    prepare_row(w, activations, x, reinterpret_cast<Number*>(items + row * stride), sums + row * groups,
                scales + row * groups, starts + row * groups);
  });
  return {items, stride, sums, scales, starts};
}

// ---- Scales of a group

LLMQ_INLINE int64_t index_of_group(const PackedWeight& w, int64_t block, int64_t group) {
  return (block * w.num_groups() + group) * kLane;
}
LLMQ_INLINE int64_t index_of_outer(const PackedWeight& w, int64_t block, int64_t group) {
  return (block * (w.num_groups() >> w.outer_shift) + (group >> w.outer_shift)) * kLane;
}

// Of scales, or of offsets. A product of int8 and fp16 is exact.
LLMQ_INLINE Floats load_scale(const PackedWeight& w, const void* p, const uint16_t* outer, int64_t block, int64_t group) {
  const int64_t index = index_of_group(w, block, group);
  switch (w.scales_type) {
    case Scales::bf16: return load_bf16(static_cast<const uint16_t*>(p) + index);
    case Scales::fp16: return load_fp16(static_cast<const uint16_t*>(p) + index);
    case Scales::int8: {
      const Floats inner = load_int8(static_cast<const int8_t*>(p) + index);
      return multiply(inner, load_fp16(outer + index_of_outer(w, block, group)));
    }
    default: return load_floats(static_cast<const float*>(p) + index);
  }
}

// What a group's sum of (u - center) * x is multiplied with, and what the sum of its x is: by blocks of outputs.
struct GroupScale {
  Floats scale, correction;
};

template <class Input>
LLMQ_INLINE GroupScale load_group(const PackedWeight& w, int64_t block, int64_t group) {
  const int taken_off = center_of<Input>(w);
  const Floats center = broadcast(static_cast<float>(taken_off));
  const Floats scale = load_scale(w, w.scales, w.outer_scales, block, group);
  if (w.offsets) {
    return {scale, multiply_add(center, scale, load_scale(w, w.offsets, w.outer_offsets, block, group))};
  }
  if (w.zeros) {
    const Floats zero = load_uint8(w.zeros + index_of_group(w, block, group));
    return {scale, multiply(subtract(center, zero), scale)};
  }
  return {scale, multiply(broadcast(static_cast<float>(taken_off - w.center())), scale)};
}

// Orders what load_group will read.
LLMQ_INLINE void prefetch_group(const PackedWeight& w, int64_t block, int64_t group) {
  const int64_t index = index_of_group(w, block, group);
  const int64_t bytes = w.scales_type == Scales::fp32 ? 4 : w.scales_type == Scales::int8 ? 1 : 2;
  __builtin_prefetch(static_cast<const uint8_t*>(w.scales) + index * bytes);
  if (w.offsets) __builtin_prefetch(static_cast<const uint8_t*>(w.offsets) + index * bytes);
  if (w.zeros) __builtin_prefetch(w.zeros + index);
  if (w.outer_scales) __builtin_prefetch(w.outer_scales + index_of_outer(w, block, group));
  if (w.outer_offsets) __builtin_prefetch(w.outer_offsets + index_of_outer(w, block, group));
}

// ---- Sums of products

// The weights of 8 inputs.
template <Numbers kNumbers>
LLMQ_INLINE void expand(const uint8_t* p, Pair out[kPairsOfStep]) {
  if constexpr (kNumbers == Numbers::int4) {
    expand_int4(p, out);
  } else if constexpr (kNumbers == Numbers::int3) {
    expand_int3(p, out);
  } else if constexpr (kNumbers == Numbers::int8) {
    expand_int8_line(p, out);
    expand_int8_line(p + 64, out + kPairsOfStep / 2);
  } else if constexpr (kNumbers == Numbers::fp8) {
    expand_e4m3_line(p, out);
    expand_e4m3_line(p + 64, out + kPairsOfStep / 2);
  } else {
    for (int i = 0; i < 4; i++) expand_bf16_line(p + 64 * i, out + kPairsOfStep / 4 * i);
  }
}
template <Numbers kNumbers>
LLMQ_INLINE void expand(const uint8_t* p, Ints out[2]) {
  if constexpr (kNumbers == Numbers::int4) {
    expand_nibbles(load_line(p), 15, out);
  } else if constexpr (kNumbers == Numbers::int3) {
    expand_nibbles(load_int3_line(p), 7, out);
  } else {
    out[0] = load_line(p);
    out[1] = load_line(p + 64);
  }
}

#ifdef LLMQ_SUMS_IN_WORDS
template <Numbers kNumbers>
LLMQ_INLINE void expand(const uint8_t* p, WordLine out[4]) {
  expand_to_words(p, out);
  expand_to_words(p + 64, out + 2);
}
#endif

LLMQ_INLINE Floats begin_sum(const ExactInput&, int64_t) { return zero_floats(); }
LLMQ_INLINE Floats begin_sum(const ScaledInput&, int64_t) { return zero_floats(); }
template <class Number, class Item>
LLMQ_INLINE Ints begin_sum(const Rounded<Number, Item>& x, int64_t index) {
  return broadcast_int(x.starts[index]);
}
#ifndef LLMQ_TILES
LLMQ_INLINE Floats add_product(Floats sum, const Pair& w, const InputPair* x) { return dot_pair(sum, w, x); }
#endif
#ifdef LLMQ_SUMS_IN_WORDS
LLMQ_INLINE WordSums add_product(WordSums sum, const Ints& w, const int32_t* x) { return dot_bytes(sum, w, x); }
LLMQ_INLINE Ints add_product(Ints sum, const WordLine& w, const InputWords* x) { return dot_words(sum, w, x); }
#else
LLMQ_INLINE Ints add_product(Ints sum, const Ints& w, const int32_t* x) { return dot_bytes(sum, w, x); }
#endif
LLMQ_INLINE Floats end_sum(const ExactInput&, int64_t, Floats sum) { return sum; }
LLMQ_INLINE Floats end_sum(const ScaledInput& x, int64_t index, Floats sum) {
  return multiply(sum, broadcast(x.scales[index]));
}
template <class Number, class Item>
LLMQ_INLINE Floats end_sum(const Rounded<Number, Item>& x, int64_t index, Ints sum) {
  return multiply(to_floats(sum), broadcast(x.scales[index]));
}

template <class Input>
struct KindOf;
template <>
struct KindOf<ExactInput> {
  using Weight = Pair;
  using Sum = Floats;
  static constexpr bool kHasProducts = false;
  static constexpr int kTileRows = kExactTileRows, kGroupedTileRows = kExactGroupedTileRows;
  static constexpr bool kHoldsTotals = kExactHoldsTotals;
  static constexpr int64_t kWeightBytes = kPairBytes;
};
template <>
struct KindOf<ScaledInput> : KindOf<ExactInput> {};
template <>
struct KindOf<RoundedInput> {
  using Weight = Ints;
  using Sum = Ints;
#ifdef LLMQ_SUMS_IN_WORDS
  static constexpr bool kHasProducts = true;
  using Products = WordSums;
#else
  static constexpr bool kHasProducts = false;
#endif
  static constexpr int kTileRows = kRoundedTileRows, kGroupedTileRows = kRoundedGroupedTileRows;
  static constexpr bool kHoldsTotals = kRoundedHoldsTotals;
  static constexpr int64_t kWeightBytes = 64;
};
#ifdef LLMQ_SUMS_IN_WORDS
template <>
struct KindOf<RoundedWords> : KindOf<RoundedInput> {
  using Weight = WordLine;
  static constexpr bool kHasProducts = false;
};
#endif

// body(item, weights), for each item of a step.
template <Numbers kNumbers, class Input, class Body>
LLMQ_INLINE void for_weights(const uint8_t* p, const Body& body) {
#if !defined(__AVX512F__) && !defined(LLMQ_TILES)
  if constexpr (std::is_same_v<Input, ExactInput>) {
    if constexpr (kNumbers == Numbers::int4) return nibbles_in_place(load_line(p), body);
    if constexpr (kNumbers == Numbers::int3) return nibbles_in_place(int3_as_int4(p), body);
    if constexpr (kNumbers == Numbers::int8) {
      bytes_in_place(load_line(p), body);
      return bytes_in_place(load_line(p + 64), [&](int i, const Pair& w) LLMQ_UNROLLED { body(i + 4, w); });
    }
  }
#endif
  typename KindOf<Input>::Weight weights[Input::kItemsOfStep];
  expand<kNumbers>(p, weights);
#pragma GCC unroll 8
  for (int i = 0; i < Input::kItemsOfStep; i++) body(i, weights[i]);
}

// add(sums, until) up to `end`. Where products are summed in less than a Sum first (Products), run by run.
template <class Input, int kRows, int kBlocks, class Add>
LLMQ_INLINE void add_up_to(int64_t end, int64_t& at, int64_t run, typename KindOf<Input>::Sum (&sums)[kRows][kBlocks],
                           const Add& add) {
  if constexpr (!KindOf<Input>::kHasProducts) {
    add(sums, end);
  } else {
    while (at < end) {
      typename KindOf<Input>::Products products[kRows][kBlocks];
#pragma GCC unroll 12
      for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (int b = 0; b < kBlocks; b++) set_to_zero(products[r][b]);
      }
      add(products, min(end, at + run));
#pragma GCC unroll 12
      for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (int b = 0; b < kBlocks; b++) sums[r][b] = add_words(sums[r][b], products[r][b]);
      }
    }
  }
}

// ---- The output

struct Sink {
  void* y;
  int64_t stride;
  Output type;
  const float* bias;
  int64_t out_features;

  void put(int64_t row, int64_t block, Floats v) const {
    const int64_t first = block * kLane, count = min(kLane, out_features - first);
    if (count == kLane) {
      if (bias) v = add(v, load_floats(bias + first));
      if (type == Output::fp32) return store_floats(static_cast<float*>(y) + row * stride + first, v);
      return store_bf16(static_cast<uint16_t*>(y) + row * stride + first, v);
    }
    alignas(64) float lanes[kLane] = {};
    if (bias) {
      memcpy(lanes, bias + first, count * sizeof(float));
      v = add(v, load_floats(lanes));
    }
    if (type == Output::fp32) {
      store_floats(lanes, v);
      memcpy(static_cast<float*>(y) + row * stride + first, lanes, count * sizeof(float));
    } else {
      uint16_t halves[kLane];
      store_bf16(halves, v);
      memcpy(static_cast<uint16_t*>(y) + row * stride + first, halves, count * sizeof(uint16_t));
    }
  }
};

// From a line to that which is wanted when the blocks at hand are done.
LLMQ_INLINE int64_t prefetch_distance(int64_t bytes) { return bytes > kPrefetchMost ? kPrefetchAhead : bytes; }

// ---- Few rows

// Where the lines lie that a step of few_rows orders from memory, one for each of its own: from + block * of_block +
// step * of_step.
struct Ahead {
  const uint8_t* from;
  int64_t of_block, of_step;
};

// Memory is fast along one line of addresses and slow along as many as there are blocks. So the next blocks, which lie
// one behind the other, are fetched from their first byte to their last, and found in the cache then; no more than the
// thread will reach. Where they would not stay there, each block's own lines are fetched.
LLMQ_INLINE Ahead lines_ahead(const PackedWeight& w, int64_t line_bytes, int64_t blocks, int64_t block, int64_t end) {
  const uint8_t* lines = w.numbers + block * w.block_bytes();
  if (blocks * w.block_bytes() > kPrefetchMostOfFewRows) return {lines + kPrefetchAhead, w.block_bytes(), line_bytes};
  if (block + blocks >= end) return {lines, 0, 0};
  return {lines + blocks * w.block_bytes(), line_bytes, blocks * line_bytes};
}

// end: of the blocks that the thread is about to go through.
template <Numbers kNumbers, int kRows, int kBlocks, class Input>
void few_rows(const PackedWeight& w, const Input& x, int64_t row, int64_t block, int64_t end_block, const Sink& sink) {
  using Sum = typename KindOf<Input>::Sum;
  using Weight = typename KindOf<Input>::Weight;
  constexpr int kItems = Input::kItemsOfStep;
  constexpr int64_t kLineBytes = line_bytes(kNumbers);
  const int64_t block_bytes = w.block_bytes(), groups = w.num_groups();
  const int64_t steps = w.padded_in() / 8, steps_of_group = kNumbers == Numbers::bf16 ? steps : w.group_size / 8;
  const bool corrects = has_corrections<Input>(w);
  Ahead ahead = lines_ahead(w, kLineBytes, kBlocks, block, end_block);
  const uint8_t* lines = w.numbers + block * block_bytes;
  const typename Input::Item* items = x.items + row * x.stride;
  Floats totals[kRows][kBlocks];
  for (auto& of_row : totals) {
    for (auto& total : of_row) total = zero_floats();
  }
  for (int64_t group = 0, step = 0; group < groups; group++) {
    Sum sums[kRows][kBlocks];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
      for (auto& sum : sums[r]) sum = begin_sum(x, (row + r) * groups + group);
    }
    const int64_t end = group + 1 == groups ? steps : step + steps_of_group;
    add_up_to<Input>(end, step, kMostProducts / kItems, sums, [&](auto& products, int64_t until) LLMQ_UNROLLED {
      for (; step < until; step++) {
#pragma GCC unroll 8
        for (int b = 0; b < kBlocks; b++) {
          const uint8_t* p = lines + b * block_bytes;
          for (int64_t line = 0; line < kLineBytes; line += 64) {
            __builtin_prefetch(ahead.from + b * ahead.of_block + line, 0, 2);
          }
          for_weights<kNumbers, Input>(p, [&](int i, const Weight& weight) LLMQ_UNROLLED {
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
              products[r][b] = add_product(products[r][b], weight, items + r * x.stride + i);
            }
          });
        }
        lines += kLineBytes;
        items += kItems;
        ahead.from += ahead.of_step;
      }
    });
    for (int b = 0; b < kBlocks; b++) {
      if constexpr (kNumbers == Numbers::bf16) {
        for (int r = 0; r < kRows; r++) totals[r][b] = end_sum(x, 0, sums[r][b]);
      } else {
        const GroupScale scale = load_group<Input>(w, block + b, group);
        prefetch_group(w, block + b + kBlocks, group);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
          const int64_t index = (row + r) * groups + group;
          totals[r][b] = multiply_add(end_sum(x, index, sums[r][b]), scale.scale, totals[r][b]);
          if (corrects) totals[r][b] = multiply_add(scale.correction, broadcast(x.sums[index]), totals[r][b]);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) {
    for (int b = 0; b < kBlocks; b++) sink.put(row + r, block + b, totals[r][b]);
  }
}

template <Numbers kNumbers, int kRows, class Input>
void few_rows_of(const PackedWeight& w, const Input& x, int64_t row, const Sink& sink) {
  constexpr int kBlocks = kFewRowsBlocks[kRows];
  const int64_t units = (w.num_blocks() + kBlocks - 1) / kBlocks;
  thread_pool().parallel_runs(units, [&](int64_t unit, int64_t end_of_run) {
    const int64_t end_block = min(end_of_run * kBlocks, w.num_blocks());
    int64_t block = unit * kBlocks;
    if (block + kBlocks <= end_block) {
      few_rows<kNumbers, kRows, kBlocks>(w, x, row, block, end_block, sink);
    } else {
      for (; block < end_block; block++) few_rows<kNumbers, kRows, 1>(w, x, row, block, end_block, sink);
    }
  });
}

// Some more rows: in tiles, one block of outputs after the other. Unpacking a line once for each tile costs less than
// to write it down and read it again, which is what many rows share.
template <Numbers kNumbers, int kRows, class Input>
void few_rows_of_block(int rows, const PackedWeight& w, const Input& x, int64_t row, int64_t block, int64_t end_block,
                       const Sink& sink) {
  if (rows == kRows) return few_rows<kNumbers, kRows, 1>(w, x, row, block, end_block, sink);
  if constexpr (kRows < kDirectTileRows) {
    few_rows_of_block<kNumbers, kRows + 1>(rows, w, x, row, block, end_block, sink);
  }
}

// One more than a tile's, halved.
constexpr int kFewestOfTile = kDirectTileRows / 2 < kFewRows ? (kDirectTileRows + 1) / 2 : kFewRows;

template <Numbers kNumbers, class Input>
void some_rows(const PackedWeight& w, const Input& x, int64_t num_rows, const Sink& sink) {
  const int64_t tiles = (num_rows + kDirectTileRows - 1) / kDirectTileRows;
  thread_pool().parallel_runs(w.num_blocks(), [&](int64_t block, int64_t end_of_run) {
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t first = num_rows * t / tiles, rows = num_rows * (t + 1) / tiles - first;
      few_rows_of_block<kNumbers, kFewestOfTile>(static_cast<int>(rows), w, x, first, block, end_of_run, sink);
    }
  });
}

// ---- Many rows

// Some blocks' weights of a stretch of the input, unpacked: [block][item].
struct Panel {
  const uint8_t* weights;
  int64_t block_stride;      // bytes
  int64_t prefetch_distance;  // bytes
  const GroupScale* scales;  // [group of the stretch][block]
  int64_t first_group, num_groups;
  int64_t items_of_group;  // of the stretch's last group there may be fewer
  int64_t num_items;
};

#ifndef LLMQ_TILES
LLMQ_INLINE Pair load_weight(const uint8_t* p, Pair*) { return load_pair(p); }
#endif
LLMQ_INLINE Ints load_weight(const uint8_t* p, Ints*) { return load_line(p); }
LLMQ_INLINE void store_weight(uint8_t* p, const Pair& w) { store_pair(p, w); }
LLMQ_INLINE void store_weight(uint8_t* p, const Ints& w) { store_line(p, w); }
#ifdef LLMQ_SUMS_IN_WORDS
LLMQ_INLINE WordLine load_weight(const uint8_t* p, WordLine*) { return {load_line(p)}; }
LLMQ_INLINE void store_weight(uint8_t* p, const WordLine& w) { store_line(p, w.v); }
#endif

LLMQ_INLINE Floats load_sum(const float* p, Floats*) { return load_floats(p); }
LLMQ_INLINE Ints load_sum(const float* p, Ints*) { return load_line(reinterpret_cast<const uint8_t*>(p)); }
LLMQ_INLINE void store_sum(float* p, Floats v) { store_floats(p, v); }
LLMQ_INLINE void store_sum(float* p, Ints v) { store_line(reinterpret_cast<uint8_t*>(p), v); }

// A tile of rows through a panel. totals: [row][block][kLane]. A group that is all of the input (kOneGroup) leaves its
// sum there from stretch to stretch; others end within a stretch and leave the total of what is scaled.
template <int kRows, int kBlocks, bool kOneGroup, bool kPrefetches, class Input>
void tile(const Panel& panel, const Input& x, int64_t row, int64_t first_item, int64_t groups, bool is_first,
          bool corrects, float* totals) {
  using Sum = typename KindOf<Input>::Sum;
  using Weight = typename KindOf<Input>::Weight;
  const typename Input::Item* items = x.items + row * x.stride + first_item;
  const uint8_t* weights = panel.weights;
  // A group ends after few products: what they are added to stays in registers, if there are any left.
  constexpr bool kHolds = !kOneGroup && KindOf<Input>::kHoldsTotals;
  Floats held[kHolds ? kRows : 1][kBlocks];
  if constexpr (kHolds) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) {
        held[r][b] = is_first ? zero_floats() : load_floats(totals + (r * kTileBlocks + b) * kLane);
      }
    }
  }
  int64_t item = 0;
  for (int64_t group = 0; group < panel.num_groups; group++) {
    Sum sums[kRows][kBlocks];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) {
        if (kOneGroup && !is_first) {
          sums[r][b] = load_sum(totals + (r * kTileBlocks + b) * kLane, static_cast<Sum*>(nullptr));
        } else {
          sums[r][b] = begin_sum(x, (row + r) * groups + panel.first_group + group);
        }
      }
    }
    const int64_t end = min(panel.num_items, item + panel.items_of_group);
    add_up_to<Input>(end, item, kMostProducts, sums, [&](auto& products, int64_t until) LLMQ_UNROLLED {
      for (; item < until; item++) {
        Weight w[kBlocks];
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; b++) {
          w[b] = load_weight(weights + b * panel.block_stride, static_cast<Weight*>(nullptr));
          if (kPrefetches) __builtin_prefetch(weights + b * panel.block_stride + panel.prefetch_distance);
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
          for (int b = 0; b < kBlocks; b++) products[r][b] = add_product(products[r][b], w[b], items + r * x.stride);
        }
        weights += KindOf<Input>::kWeightBytes;
        items++;
      }
    });
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) {
        float* total = totals + (r * kTileBlocks + b) * kLane;
        if constexpr (kOneGroup) {
          store_sum(total, sums[r][b]);
        } else {
          const int64_t index = (row + r) * groups + panel.first_group + group;
          const GroupScale& scale = panel.scales[group * kTileBlocks + b];
          Floats sum;
          if constexpr (kHolds) {
            sum = held[r][b];
          } else {
            sum = is_first && group == 0 ? zero_floats() : load_floats(total);
          }
          sum = multiply_add(end_sum(x, index, sums[r][b]), scale.scale, sum);
          if (corrects) sum = multiply_add(scale.correction, broadcast(x.sums[index]), sum);
          if constexpr (kHolds) {
            held[r][b] = sum;
          } else {
            store_floats(total, sum);
          }
        }
      }
    }
  }
  if constexpr (kHolds) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) store_floats(totals + (r * kTileBlocks + b) * kLane, held[r][b]);
    }
  }
}

template <class Input, bool kOneGroup>
constexpr int kTileRowsOf = kOneGroup ? KindOf<Input>::kTileRows : KindOf<Input>::kGroupedTileRows;

template <int kBlocks, bool kOneGroup, bool kPrefetches, class Input>
void tile_of(int rows, const Panel& panel, const Input& x, int64_t row, int64_t first_item, int64_t groups,
             bool is_first, bool corrects, float* totals) {
#define LLMQ_TILE(R)                                                                                  \
  case R:                                                                                             \
    if constexpr (R <= kTileRowsOf<Input, kOneGroup>) {                                               \
      return tile<R, kBlocks, kOneGroup, kPrefetches>(panel, x, row, first_item, groups, is_first,    \
                                                      corrects, totals);                       \
    }                                                                                                 \
    break
  switch (rows) {
    LLMQ_TILE(1);
    LLMQ_TILE(2);
    LLMQ_TILE(3);
    LLMQ_TILE(4);
    LLMQ_TILE(5);
    LLMQ_TILE(6);
    LLMQ_TILE(7);
    LLMQ_TILE(8);
    LLMQ_TILE(9);
    LLMQ_TILE(10);
    LLMQ_TILE(11);
    LLMQ_TILE(12);
  }
#undef LLMQ_TILE
}

// Whether packed lines can be multiplied as they are.
template <Numbers kNumbers, class Input>
constexpr bool kIsUnpacked = std::is_same_v<Input, RoundedInput> ? kNumbers == Numbers::int8
                                                                 : kNumbers == Numbers::bf16 && kPairsAreBf16;

// A stretch of some blocks' packed lines -> [block][item].
template <Numbers kNumbers, int kBlocks, class Input>
LLMQ_INLINE void unpack(const uint8_t* lines, int64_t block_bytes, int64_t steps, uint8_t* to) {
  constexpr int kItems = Input::kItemsOfStep;
  for (int b = 0; b < kBlocks; b++) {
    const uint8_t* p = lines + b * block_bytes;
    for (int64_t step = 0; step < steps; step++, p += line_bytes(kNumbers)) {
      typename KindOf<Input>::Weight weights[kItems];
      for (int64_t line = 0; line < line_bytes(kNumbers); line += 64) {
        __builtin_prefetch(p + prefetch_distance(kBlocks * block_bytes) + line);
      }
      expand<kNumbers>(p, weights);
      for (int i = 0; i < kItems; i++, to += KindOf<Input>::kWeightBytes) store_weight(to, weights[i]);
    }
  }
}

template <Numbers kNumbers, int kBlocks, class Input>
void rows_of_blocks(const PackedWeight& w, const Input& x, int64_t first_row, int64_t end_row, int64_t block,
                    const Sink& sink) {
  constexpr int kItems = Input::kItemsOfStep;
  thread_local Scratch panel_memory, scale_memory, total_memory;
  const int64_t groups = w.num_groups(), steps = w.padded_in() / 8, block_bytes = w.block_bytes();
  const bool is_one_group = groups == 1, corrects = has_corrections<Input>(w);
  const int64_t steps_of_group = is_one_group ? steps : w.group_size / 8;
  // Stretches are about equally long.
  const int64_t stretches = (steps + kStretch / 8 - 1) / (kStretch / 8);
  const int64_t groups_of_stretch = max(1, min((groups + stretches - 1) / stretches, kStretch / 8 / steps_of_group));
  const int64_t steps_of_stretch = is_one_group ? (steps + stretches - 1) / stretches : groups_of_stretch * steps_of_group;
  const int64_t num_rows = end_row - first_row;
  constexpr bool kIsAsPacked = kIsUnpacked<kNumbers, Input>;
  const int64_t most_rows = is_one_group ? kTileRowsOf<Input, true> : kTileRowsOf<Input, false>;
  const int64_t tiles = (num_rows + most_rows - 1) / most_rows;
  float* totals = total_memory.get<float>(num_rows * kTileBlocks * kLane);
  uint8_t* unpacked = nullptr;
  if constexpr (!kIsAsPacked) {
    unpacked = panel_memory.get<uint8_t>(kBlocks * steps_of_stretch * kItems * KindOf<Input>::kWeightBytes);
  }
  auto* scales = scale_memory.get<GroupScale>(groups_of_stretch * kTileBlocks);
  for (int64_t first = 0; first < steps; first += steps_of_stretch) {
    const int64_t count = min(steps_of_stretch, steps - first);
    Panel panel{};
    panel.num_items = count * kItems;
    panel.items_of_group = is_one_group ? panel.num_items : steps_of_group * kItems;
    panel.first_group = is_one_group ? 0 : first / steps_of_group;
    panel.num_groups = is_one_group ? 1 : min(groups_of_stretch, groups - panel.first_group);
    const uint8_t* lines = w.numbers + block * block_bytes + first * line_bytes(kNumbers);
    if (!is_one_group) {
      for (int b = 0; b < kBlocks; b++) {
        for (int64_t group = 0; group < panel.num_groups; group++) prefetch_group(w, block + b, panel.first_group + group);
      }
    }
    if constexpr (kIsAsPacked) {
      panel.weights = lines;
      panel.block_stride = block_bytes;
      panel.prefetch_distance = prefetch_distance(kBlocks * block_bytes);
    } else {
      panel.weights = unpacked;
      panel.block_stride = panel.num_items * KindOf<Input>::kWeightBytes;
      unpack<kNumbers, kBlocks, Input>(lines, block_bytes, count, unpacked);
    }
    if (!is_one_group) {
      for (int64_t group = 0; group < panel.num_groups; group++) {
        for (int b = 0; b < kBlocks; b++) {
          scales[group * kTileBlocks + b] = load_group<Input>(w, block + b, panel.first_group + group);
        }
      }
      panel.scales = scales;
    }
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t begin = num_rows * t / tiles, end = num_rows * (t + 1) / tiles;
      float* of_tile = totals + begin * kTileBlocks * kLane;
      const auto run = is_one_group ? tile_of<kBlocks, true, kIsAsPacked, Input>
                                    : tile_of<kBlocks, false, kIsAsPacked, Input>;
      run(static_cast<int>(end - begin), panel, x, first_row + begin, first * kItems, groups, first == 0,
          corrects, of_tile);
    }
  }
  // Row by row: the blocks of a row are written side by side.
  const bool is_scaled = is_one_group && kNumbers != Numbers::bf16;
  GroupScale scale_of[kBlocks];
  for (int b = 0; b < kBlocks; b++) {
    scale_of[b] = is_scaled ? load_group<Input>(w, block + b, 0) : GroupScale{zero_floats(), zero_floats()};
  }
  for (int64_t row = 0; row < num_rows; row++) {
    for (int b = 0; b < kBlocks; b++) {
      const float* p = totals + (row * kTileBlocks + b) * kLane;
      Floats total;
      if (is_scaled) {
        const int64_t index = first_row + row;
        using Sum = typename KindOf<Input>::Sum;
        const Floats sum = end_sum(x, index, load_sum(p, static_cast<Sum*>(nullptr)));
        total = multiply_add(sum, scale_of[b].scale, zero_floats());
        if (corrects) total = multiply_add(scale_of[b].correction, broadcast(x.sums[index]), total);
      } else {
        total = load_floats(p);
      }
      sink.put(first_row + row, block + b, total);
    }
  }
}

template <Numbers kNumbers, class Input>
void many_rows(const PackedWeight& w, const Input& x, int64_t num_rows, const Sink& sink) {
  const int64_t panels = (w.num_blocks() + kTileBlocks - 1) / kTileBlocks;
  const int64_t parts = (num_rows + kRowsOfTask - 1) / kRowsOfTask;
  thread_pool().parallel_for(panels * parts, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; task++) {
      const int64_t block = task / parts * kTileBlocks, part = task % parts;
      const int64_t first_row = num_rows * part / parts, end_row = num_rows * (part + 1) / parts;
      if (block + kTileBlocks <= w.num_blocks()) {
        rows_of_blocks<kNumbers, kTileBlocks>(w, x, first_row, end_row, block, sink);
      } else {
        rows_of_blocks<kNumbers, 1>(w, x, first_row, end_row, block, sink);
      }
    }
  });
}

#ifdef LLMQ_TILES
#include "linear_tiles.h"
#else
template <Numbers kNumbers, class Input>
void run(const PackedWeight& w, const Input& x, int64_t num_rows, const Sink& sink) {
  switch (num_rows) {
    case 1: return few_rows_of<kNumbers, 1>(w, x, 0, sink);
    case 2: return few_rows_of<kNumbers, 2>(w, x, 0, sink);
    case 3: return few_rows_of<kNumbers, 3>(w, x, 0, sink);
    case 4: return few_rows_of<kNumbers, 4>(w, x, 0, sink);
    default: break;
  }
  if constexpr (!kIsUnpacked<kNumbers, Input> && kDirectTileRows > kFewRows) {
    if (num_rows <= direct_tiles(kNumbers) * kDirectTileRows) return some_rows<kNumbers>(w, x, num_rows, sink);
  }
  many_rows<kNumbers>(w, x, num_rows, sink);
}
#endif

void run_linear(const PackedWeight& w, Activations activations, Rows rows, int64_t num_rows, const Sink& sink) {
  thread_local InputMemory memory;
  if (w.numbers_type == Numbers::fp8) {
    return run<Numbers::fp8>(w, prepare_scaled(w, activations, rows, num_rows, memory), num_rows, sink);
  }
  if (activations.mode == Activations::Mode::exact || w.numbers_type == Numbers::bf16) {
    const ExactInput x = prepare_exact(w, rows, num_rows, memory);
    switch (w.numbers_type) {
      case Numbers::bf16: return run<Numbers::bf16>(w, x, num_rows, sink);
      case Numbers::int8: return run<Numbers::int8>(w, x, num_rows, sink);
      case Numbers::int3: return run<Numbers::int3>(w, x, num_rows, sink);
      default: return run<Numbers::int4>(w, x, num_rows, sink);
    }
  }
  if (w.numbers_type == Numbers::int8) {
    return run<Numbers::int8>(w, prepare_rounded<RoundedInt8>(w, activations, rows, num_rows, memory), num_rows, sink);
  }
  const auto x = prepare_rounded<RoundedInput>(w, activations, rows, num_rows, memory);
  if (w.numbers_type == Numbers::int3) return run<Numbers::int3>(w, x, num_rows, sink);
  run<Numbers::int4>(w, x, num_rows, sink);
}

}  // namespace

void linear(const PackedWeight& weight, Activations activations, const uint16_t* x, int64_t num_rows, int64_t x_stride,
            void* y, int64_t y_stride, Output output) {
  run_linear(weight, activations, {x, x_stride}, num_rows, {y, y_stride, output, weight.bias, weight.out_features});
}

}  // namespace llmq::LLMQ_ISA
