// K or V of one layer in the blocks of a KVStore (runtime/kv_store.py says how a block is laid out).
//
// Functions are inlined wherever they are used: this is compiled for several instruction sets.
#pragma once

#include <cstdint>

namespace llmq {

// As runtime/kv_codec.py stores them. Eight bits and fewer come with a scale, a number of 16 bits for each token and
// KV head, or one of the layer.
enum class KVFormat : int32_t { fp32, fp16, bf16, int8, fp8, int4 };

constexpr int kMostHeadDim = 512;

// How numbers of several tokens and heads lie in a block. In tiles of kTileTokens tokens what is read one after the other
// for a head lies so: strides from key to key cost a third of the memory's speed.
enum class KVOrder : int32_t {
  by_token,  // [block_tokens, num_kv_heads, head_dim]
  by_head,   // [block_tokens / kTileTokens, num_kv_heads, kTileTokens, head_dim]
  by_unit,   // [block_tokens / kTileTokens, num_kv_heads, head_bytes / kTileUnit, kTileTokens] units of kTileUnit bytes:
             // the same numbers of as many keys make a vector
};
constexpr int kTileTokens = 16, kTileUnit = 4;

struct KVPlane {
  uint8_t* payload;       // [num_blocks] every block_stride bytes, in `order`
  uint16_t* scales;       // bfloat16 [block_tokens, num_kv_heads], block_stride bytes apart too; null: static_scale
  int64_t block_stride;   // bytes
  float static_scale;
  int32_t num_kv_heads;
  int32_t head_dim;
  KVFormat format;
  KVOrder order;

  [[gnu::always_inline]] int64_t head_bytes() const {
    switch (format) {
      case KVFormat::fp32: return int64_t{4} * head_dim;
      case KVFormat::fp16:
      case KVFormat::bf16: return int64_t{2} * head_dim;
      case KVFormat::int8:
      case KVFormat::fp8: return head_dim;
      case KVFormat::int4: return head_dim / 2;
    }
    return 0;
  }
  // Where a head of a token begins; by unit, its first unit, which the others follow every kTileTokens.
  [[gnu::always_inline]] uint8_t* head(int64_t block, int64_t offset, int head) const {
    uint8_t* const start = payload + block * block_stride;
    if (order == KVOrder::by_token) return start + (offset * num_kv_heads + head) * head_bytes();
    uint8_t* const tile = start + (offset / kTileTokens * num_kv_heads + head) * kTileTokens * head_bytes();
    return tile + offset % kTileTokens * (order == KVOrder::by_head ? head_bytes() : kTileUnit);
  }
  // Bytes from a head to the next one of the same token.
  [[gnu::always_inline]] int64_t head_stride() const {
    return order == KVOrder::by_token ? head_bytes() : kTileTokens * head_bytes();
  }
  [[gnu::always_inline]] uint16_t* scale(int64_t block, int64_t offset, int head) const {
    return scales + block * (block_stride / 2) + offset * num_kv_heads + head;
  }
};

}  // namespace llmq
