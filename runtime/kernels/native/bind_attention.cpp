#include "attention.h"
#include "bindings.h"
#include "kernels.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmq {

void bind_attention(nb::module_& module) {
  nb::enum_<KVFormat>(module, "KVFormat")
      .value("fp32", KVFormat::fp32)
      .value("fp16", KVFormat::fp16)
      .value("bf16", KVFormat::bf16)
      .value("int8", KVFormat::int8)
      .value("fp8", KVFormat::fp8)
      .value("int4", KVFormat::int4);
  nb::enum_<KVOrder>(module, "KVOrder")
      .value("by_token", KVOrder::by_token)
      .value("by_head", KVOrder::by_head)
      .value("by_unit", KVOrder::by_unit);
  module.attr("MOST_HEAD_DIM") = kMostHeadDim;
  module.attr("TILE_TOKENS") = kTileTokens;

  nb::class_<KVPlane>(module, "KVPlane", "K or V of one layer in the blocks of a KVStore; borrows its memory.")
      .def(
          "__init__",
          [](KVPlane* self, uintptr_t payload, uintptr_t scales, int64_t block_stride, float static_scale,
             int num_kv_heads, int head_dim, KVFormat format, KVOrder order) {
            new (self) KVPlane{pointer<uint8_t>(payload), pointer<uint16_t>(scales), block_stride, static_scale,
                               num_kv_heads, head_dim, format, order};
          },
          "payload"_a, "scales"_a, "block_stride"_a, "static_scale"_a, "num_kv_heads"_a, "head_dim"_a, "format"_a,
          "order"_a)
      .def_ro("num_kv_heads", &KVPlane::num_kv_heads)
      .def_ro("head_dim", &KVPlane::head_dim)
      .def(
          "write",
          [](const KVPlane& self, uintptr_t x, bool is_float32, int64_t stride, uintptr_t slot_block,
             uintptr_t slot_offset, int64_t num_tokens) {
            nb::gil_scoped_release release;
            thread_pool().parallel_for(num_tokens, 64, [&](int64_t begin, int64_t end, int) {
              model_kernels().write_kv(self, pointer<void>(x), is_float32, stride, pointer<int64_t>(slot_block),
                                       pointer<int64_t>(slot_offset), begin, end);
            });
          },
          "x"_a, "is_float32"_a, "stride"_a, "slot_block"_a, "slot_offset"_a, "num_tokens"_a);

  nb::class_<AttentionPlan>(module, "AttentionPlan", "A step of one KV-cache group, cut into work for threads.")
      .def(nb::init<>())
      .def(
          "start",
          [](AttentionPlan& self, int num_sequences, uintptr_t query_start, uintptr_t lengths, uintptr_t block_table,
             int64_t table_stride, int block_tokens, int window, bool rounds_to_bytes) {
            self.start({num_sequences, pointer<int32_t>(query_start), pointer<int32_t>(lengths),
                        pointer<int64_t>(block_table), table_stride, block_tokens, window, rounds_to_bytes});
          },
          "num_sequences"_a, "query_start"_a, "lengths"_a, "block_table"_a, "table_stride"_a, "block_tokens"_a,
          "window"_a, "rounds_to_bytes"_a = false, "Borrows int32 query_start and lengths, int64 block_table; window 0: all keys.")
      .def(
          "attend",
          [](AttentionPlan& self, uintptr_t queries, int64_t query_stride, uintptr_t output, int64_t output_stride,
             bool is_float32, int num_heads, float scale, float softcap, const KVPlane& keys, const KVPlane& values) {
            nb::gil_scoped_release release;
            self.attend({pointer<void>(queries), pointer<void>(output), query_stride, output_stride, is_float32,
                         num_heads, scale, softcap, keys, values});
          },
          "queries"_a, "query_stride"_a, "output"_a, "output_stride"_a, "is_float32"_a, "num_heads"_a, "scale"_a,
          "softcap"_a, "keys"_a, "values"_a);
}

}  // namespace llmq
