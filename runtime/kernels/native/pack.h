#pragma once

#include "packed_weight.h"

namespace llmq {

// Rows of numbers -> the layout of PackedWeight. rows: [out_features, in_features] of uint8 (int3, int4, int8: u, from 0; fp8: e4m3) or
// bf16. packed: num_blocks() * block_bytes().
void pack_numbers(Numbers type, const void* rows, int64_t out_features, int64_t in_features, uint8_t* packed);

// [out_features, groups] -> [block][group][kLane], elements of element_bytes (1, 2 or 4); lanes beyond are zero.
void pack_groups(int element_bytes, const void* rows, int64_t out_features, int64_t groups, void* packed);

}  // namespace llmq
