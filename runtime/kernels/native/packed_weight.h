#pragma once

#include <cstddef>
#include <cstdint>

namespace llmq {

// Outputs that share a cache line of numbers; the last block of a weight is filled up with zeros.
constexpr int64_t kLane = 16;
// Every weight's in_features is filled up to a multiple of this with zeros.
constexpr int64_t kInputStep = 8;

enum class Numbers { bf16, int8, int4, int3, fp8 };
enum class Scales { none, bf16, fp16, fp32, int8 };

constexpr int bits_of(Numbers numbers) {
  switch (numbers) {
    case Numbers::bf16: return 16;
    case Numbers::int4: return 4;
    case Numbers::int3: return 3;
    default: return 8;
  }
}

// A linear's weight [out_features, in_features] as the kernels read it; borrows its memory.
//
//     weight[o, column_order[j]] = scale[o, g] * (u[o, j] - zero[o, g])      or, with offsets,
//     weight[o, column_order[j]] = scale[o, g] * u[o, j] + offset[o, g]      with g = j / group_size
//
// u counts from 0: int3 in [0, 7], int4 in [0, 15], int8 in [0, 255]; a weight without zeros and offsets is symmetric,
// its zero is center(). bf16 numbers are the weight itself, without scales; fp8 ones (e4m3fn, no NaN among them) times a
// scale are.
//
// Blocks of kLane outputs lie one after the other. In a block, a cache line of 64 bytes holds four bytes a lane (an
// output), and lines go up along the input:
//     int4: 8 inputs a line: the low nibbles of bytes 0, 2, 1, 3 of a lane are inputs 0 to 3, the high ones 4 to 7
//     int8, fp8: 4 inputs a line: bytes 0, 2, 1, 3 of a lane
//     bf16: 2 inputs a line
//     int3: 8 inputs in 48 bytes, of which an int4 line is put together. 32 bytes hold the lower two bits of each nibble:
//           those of lane l are in bytes 4 (l mod 8) to 4 (l mod 8) + 3, from bit 0 or 4 on, or of lanes from 8 up from
//           bit 2 or 6. 16 bytes hold the third: bit l / 4, or 4 more, of bytes 4 (l mod 4) to 4 (l mod 4) + 3
// The order of bytes lets a nibble's or a byte's neighbour in bf16 be its neighbour in the input.
// scales, zeros and offsets: [block][group][kLane]. int8 scales and offsets are times an outer one, in fp16, that
// 1 << outer_shift groups of a row share, all of them whole: [block][num_groups() >> outer_shift][kLane].
struct PackedWeight {
  Numbers numbers_type;
  Scales scales_type;  // of scales and offsets
  int64_t out_features;
  int64_t in_features;
  int64_t group_size;  // a multiple of kInputStep, or in_features where a row has one scale
  const uint8_t* numbers;
  const void* scales = nullptr;
  const uint8_t* zeros = nullptr;
  const void* offsets = nullptr;
  const float* bias = nullptr;           // [out_features]
  const int32_t* column_order = nullptr;  // [in_features]: the input that each stored column multiplies
  int outer_shift = 0;
  const uint16_t* outer_scales = nullptr;
  const uint16_t* outer_offsets = nullptr;

  int64_t padded_in() const { return (in_features + kInputStep - 1) / kInputStep * kInputStep; }
  int64_t num_blocks() const { return (out_features + kLane - 1) / kLane; }
  int64_t num_groups() const { return scales_type == Scales::none ? 1 : (in_features + group_size - 1) / group_size; }
  // Bytes of a block of kLane outputs.
  int64_t block_bytes() const { return padded_in() * bits_of(numbers_type) / 8 * kLane; }
  // What is taken from an integer before it is multiplied: the middle of its range.
  int center() const { return 1 << (bits_of(numbers_type) - 1); }
};

}  // namespace llmq
