#include "pack.h"

#include <cstring>

#include "pool.h"

namespace llmq {
namespace {

constexpr int kByteOfInput[4] = {0, 2, 1, 3};

void pack_int4_block(const uint8_t* rows, int64_t in_features, int64_t num_rows, int64_t lines, uint8_t* packed) {
  for (int64_t lane = 0; lane < num_rows; lane++) {
    const uint8_t* row = rows + lane * in_features;
    for (int64_t line = 0; line < lines; line++) {
      uint8_t u[8] = {};
      const int64_t first = line * 8;
      std::memcpy(u, row + first, in_features - first < 8 ? in_features - first : 8);
      uint8_t* bytes = packed + line * 64 + lane * 4;
      for (int input = 0; input < 4; input++) bytes[kByteOfInput[input]] = (u[input] & 15) | u[input + 4] << 4;
    }
  }
}

void pack_int3_block(const uint8_t* rows, int64_t in_features, int64_t num_rows, uint8_t* packed) {
  for (int64_t lane = 0; lane < num_rows; lane++) {
    const uint8_t* row = rows + lane * in_features;
    for (int64_t input = 0; input < in_features; input++) {
      const int u = row[input] & 7, byte = kByteOfInput[input % 4], nibble = input % 8 / 4 * 4;
      uint8_t* step = packed + input / 8 * 48;
      step[lane % 8 * 4 + byte] |= (u & 3) << (nibble + lane / 8 * 2);
      step[32 + lane % 4 * 4 + byte] |= (u >> 2) << (nibble + lane / 4);
    }
  }
}

void pack_int8_block(const uint8_t* rows, int64_t in_features, int64_t num_rows, uint8_t* packed) {
  for (int64_t lane = 0; lane < num_rows; lane++) {
    const uint8_t* row = rows + lane * in_features;
    for (int64_t input = 0; input < in_features; input++) {
      packed[input / 4 * 64 + lane * 4 + kByteOfInput[input % 4]] = row[input];
    }
  }
}

void pack_bf16_block(const uint16_t* rows, int64_t in_features, int64_t num_rows, uint16_t* packed) {
  for (int64_t lane = 0; lane < num_rows; lane++) {
    const uint16_t* row = rows + lane * in_features;
    for (int64_t input = 0; input < in_features; input++) packed[input / 2 * 32 + lane * 2 + input % 2] = row[input];
  }
}

}  // namespace

void pack_numbers(Numbers type, const void* rows, int64_t out_features, int64_t in_features, uint8_t* packed) {
  const PackedWeight shape{type, Scales::none, out_features, in_features, in_features, packed};
  const int64_t block_bytes = shape.block_bytes(), lines = shape.padded_in() / 8;
  thread_pool().parallel_for(shape.num_blocks(), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t block = begin; block < end; block++) {
      uint8_t* to = packed + block * block_bytes;
      std::memset(to, 0, block_bytes);
      const int64_t first = block * kLane, num_rows = out_features - first < kLane ? out_features - first : kLane;
      const uint8_t* bytes = static_cast<const uint8_t*>(rows) + first * in_features;
      if (type == Numbers::int4) pack_int4_block(bytes, in_features, num_rows, lines, to);
      if (type == Numbers::int3) pack_int3_block(bytes, in_features, num_rows, to);
      if (type == Numbers::int8 || type == Numbers::fp8) pack_int8_block(bytes, in_features, num_rows, to);
      if (type == Numbers::bf16) {
        pack_bf16_block(static_cast<const uint16_t*>(rows) + first * in_features, in_features, num_rows,
                        reinterpret_cast<uint16_t*>(to));
      }
    }
  });
}

void pack_groups(int element_bytes, const void* rows, int64_t out_features, int64_t groups, void* packed) {
  const int64_t num_blocks = (out_features + kLane - 1) / kLane;
  auto* to = static_cast<uint8_t*>(packed);
  auto* from = static_cast<const uint8_t*>(rows);
  std::memset(to, 0, num_blocks * groups * kLane * element_bytes);
  for (int64_t out = 0; out < out_features; out++) {
    for (int64_t group = 0; group < groups; group++) {
      const int64_t place = (out / kLane * groups + group) * kLane + out % kLane;
      std::memcpy(to + place * element_bytes, from + (out * groups + group) * element_bytes, element_bytes);
    }
  }
}

}  // namespace llmq
