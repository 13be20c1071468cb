#pragma once

#include <cstdint>

#include "packed_weight.h"

namespace llmq {

// How a product takes its input.
struct Activations {
  enum class Mode {
    exact,       // bf16 as it comes, products summed in fp32
    int8_group,  // rounded to int8 with one scale, max|x| / 127, for each group of the weight
    int8_row,    // rounded to int8 with one scale a row, max|x| / 127.5, or input_scale where that is not 0
    fp8_group,   // rounded to e4m3, of fp8 weights: one scale, max|x| / 448, for each group of the weight
    fp8_row,     // likewise one scale a row, or input_scale where that is not 0
  } mode = Mode::exact;
  float input_scale = 0;
};

enum class Output { bf16, fp32 };

// y = x Wᵀ + bias. x: bf16 [num_rows, in_features], y: [num_rows, out_features] of `output`; strides in elements.
//
// A row of y is the same to the last bit whatever num_rows is and whoever computes it: each output is one sum in an
// order that the instruction set and the weight's shape decide alone, group by group.
void linear(const PackedWeight& weight, Activations activations, const uint16_t* x, int64_t num_rows, int64_t x_stride,
            void* y, int64_t y_stride, Output output);

}  // namespace llmq
