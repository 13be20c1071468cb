// Attention over sequences of odd lengths in every format of the store. A store is as large as its last token needs,
// and what no token wrote is NaN: of a block, only what the sequence wrote may be read.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "cpu.h"
#include "edge.h"
#include "kernels.h"
#include "pool.h"

using namespace llmq;

namespace {

unsigned state = 1;
unsigned random_below(unsigned n) {
  state = state * 1664525 + 1013904223;
  return (state >> 8) % n;
}

// In [-2, 2).
float random_number() { return static_cast<float>(random_below(4096)) / 1024.0f - 2.0f; }

float as_float(float number) { return number; }
float as_float(uint16_t number) {
  const uint32_t bits = uint32_t{number} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
void put(float& to, float number) { to = number; }
void put(uint16_t& to, float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  to = static_cast<uint16_t>(bits >> 16);
}

struct Step {
  std::vector<int32_t> query_start{0}, lengths;
  std::vector<int64_t> slot_block, slot_offset;  // of all keys
  int32_t block_tokens;
  int64_t num_blocks = 0, last_offset = 0;
  int64_t columns = 0;
  std::unique_ptr<Edge<int64_t>> table;

  int64_t num_queries() const { return query_start.back(); }
};

Step random_step() {
  Step step;
  step.block_tokens = random_below(2) == 0 ? 16 : 1 + static_cast<int32_t>(random_below(40));
  const unsigned num_sequences = 1 + random_below(3);
  int64_t last_columns = 0;
  for (unsigned sequence = 0; sequence < num_sequences; sequence++) {
    const int32_t queries = random_below(2) == 0 ? 1 : 1 + static_cast<int32_t>(random_below(70));
    const int32_t length = queries + static_cast<int32_t>(random_below(sequence == 0 ? 700 : 90));
    step.query_start.push_back(step.query_start.back() + queries);
    step.lengths.push_back(length);
    last_columns = (length + step.block_tokens - 1) / step.block_tokens;
    step.columns = step.columns > last_columns ? step.columns : last_columns;
  }
  step.table.reset(new Edge<int64_t>((int64_t{num_sequences} - 1) * step.columns + last_columns, 0x7f));
  for (unsigned sequence = 0; sequence < num_sequences; sequence++) {
    for (int32_t key = 0; key < step.lengths[sequence]; key++) {
      const int64_t at = sequence * step.columns + key / step.block_tokens;
      if (key % step.block_tokens == 0) (*step.table)[at] = step.num_blocks++;
      step.slot_block.push_back((*step.table)[at]);
      step.slot_offset.push_back(key % step.block_tokens);
    }
  }
  step.last_offset = step.slot_offset.back();
  return step;
}

struct Plane {
  std::unique_ptr<Edge<uint8_t>> payload;
  std::unique_ptr<Edge<uint16_t>> scales;
  KVPlane plane;
};

template <class Number>
Plane written(const Step& step, KVFormat format, int num_kv_heads, int head_dim, bool has_scales, KVOrder order) {
  Plane made;
  KVPlane& plane = made.plane;
  plane = {nullptr, nullptr, 0, has_scales ? 1.0f : 0.03125f, num_kv_heads, head_dim, format, KVOrder::by_token};
  const bool fits = order == KVOrder::by_head || plane.head_bytes() % kTileUnit == 0;
  if (step.block_tokens % kTileTokens == 0 && fits) plane.order = order;
  if (format == KVFormat::fp32 || format == KVFormat::fp16 || format == KVFormat::bf16) plane.static_scale = 1.0f;
  const int64_t token_bytes = num_kv_heads * plane.head_bytes(), token_scales = num_kv_heads;
  const int64_t bytes = step.block_tokens * (token_bytes > 2 * token_scales ? token_bytes : 2 * token_scales);
  plane.block_stride = (bytes + 3) / 4 * 4;
  const int64_t full = (step.num_blocks - 1) * plane.block_stride;
  // Of tiles the last one is there as a whole.
  const int64_t of_tile = plane.order == KVOrder::by_token ? 1 : kTileTokens;
  const int64_t tokens = step.last_offset + 1, payload_tokens = (tokens + of_tile - 1) / of_tile * of_tile;
  made.payload.reset(new Edge<uint8_t>(full + payload_tokens * token_bytes, 0xff));
  plane.payload = made.payload->data();
  if (has_scales) {
    made.scales.reset(new Edge<uint16_t>(full / 2 + tokens * token_scales, 0xff));
    plane.scales = made.scales->data();
  }
  const int64_t num_keys = static_cast<int64_t>(step.slot_block.size()), width = int64_t{num_kv_heads} * head_dim;
  Edge<Number> numbers(num_keys * width);
  for (Number& number : numbers) put(number, random_number());
  model_kernels().write_kv(plane, numbers.data(), sizeof(Number) == 4, width, step.slot_block.data(),
                           step.slot_offset.data(), 0, num_keys);
  return made;
}

// False where a result is no number, or where the last one is, although its query had a NaN.
template <class Number>
bool attend(KVFormat key_format, KVFormat value_format) {
  const Step step = random_step();
  const bool is_even = key_format == KVFormat::int4 || value_format == KVFormat::int4 || random_below(2) == 0;
  const int num_kv_heads = 1 + static_cast<int>(random_below(3)), group = 1 + static_cast<int>(random_below(18));
  const auto random_dim = [] {
    return static_cast<int>(random_below(2) ? 1 + random_below(140) : 16 * (1 + random_below(9)));
  };
  int key_dim = random_dim(), value_dim = random_below(2) ? key_dim : random_dim();
  if (is_even) {
    key_dim += key_dim % 2;
    value_dim += value_dim % 2;
  }
  const auto is_scaled = [](KVFormat format) {
    const bool is_small = format == KVFormat::int8 || format == KVFormat::fp8 || format == KVFormat::int4;
    return is_small && (format == KVFormat::int4 || random_below(2) == 0);
  };
  const bool in_tiles = random_below(4) != 0;
  const KVOrder key_order = in_tiles ? KVOrder::by_unit : KVOrder::by_token;
  const KVOrder value_order = in_tiles ? KVOrder::by_head : KVOrder::by_token;
  const Plane keys = written<Number>(step, key_format, num_kv_heads, key_dim, is_scaled(key_format), key_order);
  const Plane values = written<Number>(step, value_format, num_kv_heads, value_dim, is_scaled(value_format), value_order);
  const int num_heads = num_kv_heads * group;
  const int64_t width = int64_t{num_heads} * key_dim, result_width = int64_t{num_heads} * value_dim;
  Edge<Number> queries(step.num_queries() * width), results(step.num_queries() * result_width, 0xff);
  for (Number& number : queries) put(number, random_number());
  const bool has_nan = random_below(4) == 0;
  if (has_nan) put(queries[step.num_queries() * width - 1], NAN);
  const int32_t num_sequences = static_cast<int32_t>(step.lengths.size());
  const int32_t window = random_below(2) ? 0 : 1 + static_cast<int32_t>(random_below(300));
  const float softcap = random_below(3) == 0 ? 30.0f : 0.0f;
  AttentionPlan plan;
  plan.start({num_sequences, step.query_start.data(), step.lengths.data(), step.table->data(), step.columns,
              step.block_tokens, window, random_below(2) == 0});
  plan.attend({queries.data(), results.data(), width, result_width, sizeof(Number) == 4, num_heads, 0.125f, softcap,
               keys.plane, values.plane});
  for (int64_t i = 0; i < (step.num_queries() - has_nan) * result_width; i++) {
    if (!std::isfinite(as_float(results[i]))) return false;
  }
  return std::isnan(as_float(results[step.num_queries() * result_width - 1])) == has_nan;
}

}  // namespace

int main() {
  thread_pool().resize(3);
  for (Isa one : {Isa::avx2, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx, Isa::amx_emulated}) {
    if (!runs_here(one)) continue;
    force_isa(one);
    for (int turn = 0; turn < 40; turn++) {
      for (int format = 0; format < 6; format++) {
        const auto keys = static_cast<KVFormat>(format);
        const auto values = static_cast<KVFormat>(turn % 3 == 0 ? static_cast<int>(random_below(6)) : format);
        const bool is_float32 = turn % 4 == 3;
        if (!(is_float32 ? attend<float>(keys, values) : attend<uint16_t>(keys, values))) {
          std::fprintf(stderr, "%s, turn %d, formats %d and %d: not a number\n", name_of(one), turn, format,
                       static_cast<int>(values));
          return 1;
        }
      }
    }
    std::printf("%s ok\n", name_of(one));
  }
}
