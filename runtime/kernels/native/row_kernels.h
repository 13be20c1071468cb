// What a decoder does to each token apart from the others, between its products and its attention.
//
// Rows are tokens in bfloat16; sums and functions are in float32, and results are rounded where torch's operations
// round them, so that a step agrees with theirs. Each function computes rows [begin, end).
#pragma once

#include <cstdint>

#include "attention.h"
#include "kv_plane.h"

namespace llmq {

// rms: x / sqrt(mean(x²) + eps) · weight.  layer: (x - mean) / sqrt(variance + eps) · weight + bias.
struct Norm {
  enum class Kind : int32_t { none, rms, layer } kind = Kind::none;
  int64_t size = 0;
  float eps = 0;
  const float* weight = nullptr;  // [size]
  const float* bias = nullptr;    // [size], of a layer norm
};

struct Rows {
  uint16_t* data = nullptr;
  int64_t stride = 0;  // numbers from one row to the next

  [[gnu::always_inline]] uint16_t* operator[](int64_t row) const { return data + row * stride; }
};

// out = embedding[token] · scale
struct EmbedCall {
  const uint16_t* embedding;  // [vocab_size, size]
  const int64_t* token_ids;
  int64_t size;
  float scale;  // 1: left out
  Rows out;
};

// x = x + scale · after(y), out = before(x). Without y only the norm; without `before` only the sum.
struct ResidualCall {
  int64_t size;
  Rows x;
  Rows y;
  Norm after;
  float scale;  // 1: left out
  Norm before;
  Rows out;
};

enum class ActivationFunction : int32_t { silu, gelu, gelu_tanh, relu };

// out = f(gate) · up of rows [gate | up], or f(row) where there is no gate.
struct ActivateCall {
  ActivationFunction function;
  bool gated;
  int64_t size;  // of a row of `out`
  Rows in;
  Rows out;
};

// Of rows [q | k | v]: norms of q and k, their rotation (the pairs x[i], x[i + half]), q in place, K and V to the store.
struct QkvCall {
  Rows qkv;
  int32_t num_heads, num_kv_heads, head_dim_k, head_dim_v;
  Norm q_norm, k_norm;  // over a head, or over all of q and k, by their sizes
  const float* cos;     // [max_positions, half]; null: no rotation
  const float* sin;
  int32_t half;
  const int64_t* positions;    // of the tokens in their sequences
  const int64_t* slot_block;   // where K and V of each token go
  const int64_t* slot_offset;
  KVPlane keys, values;
};

// out[t] = Σ weights[t, k] · x[place[t, k]] over the choices of a token, in their order.
struct CombineCall {
  Rows x;
  const int64_t* place;  // [tokens, choices]
  const float* weights;  // likewise
  int choices;
  int64_t size;
  Rows out;
};

// The functions of one instruction set.
struct ModelKernels {
  void (*embed)(const EmbedCall&, int64_t begin, int64_t end);
  void (*residual)(const ResidualCall&, int64_t begin, int64_t end);
  void (*activate)(const ActivateCall&, int64_t begin, int64_t end);
  void (*combine)(const CombineCall&, int64_t begin, int64_t end);
  void (*prepare_qkv)(const QkvCall&, int64_t begin, int64_t end);
  // K or V [num_tokens, num_kv_heads, head_dim] of either dtype -> the store.
  void (*write_kv)(const KVPlane&, const void* x, bool is_float32, int64_t stride, const int64_t* slot_block,
                   const int64_t* slot_offset, int64_t begin, int64_t end);
  AttentionKernel attend;
};

}  // namespace llmq
