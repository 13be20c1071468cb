// Tokens drawn from rows of logits: what runtime/sampling/sampler.py draws, without a sort of the vocabulary.
#pragma once

#include <cstdint>

namespace llmq {

// How the token of a row is drawn.
struct Draw {
  uint64_t seed;
  int64_t position;
  int64_t top_k;      // 0: all
  double top_p;       // the smallest head of the ordered tokens whose share reaches this; 1: all
  float min_p;        // tokens less likely than this times the likeliest go; 0: none
  float temperature;  // 0, or so low that the highest logit overflows: the likeliest token, the first of several
};

// logits: [num_rows, vocab_size], rows stride apart. `highest` is the largest logit of a row, NaN where any is; then,
// and where it is infinite, the token is of no meaning.
//
// Of what top-k, then top-p, then min-p leave, the token with the largest p / e is drawn, where e ~ Exp(1) is keyed by
// (seed, position, token): the Gumbel-max trick, with the noise of runtime/sampling/noise.py.
void sample(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t stride, const Draw* draws,
            int64_t* token_ids, float* highest);

// Parts of it by the vectors of one instruction set.
struct SampleKernels {
  // The largest of x and where it is first; NaN, wherever, where any is.
  float (*largest)(const float* x, int64_t count, int64_t* index);
  // weights = exp(x / temperature - highest / temperature)
  void (*weigh)(const float* x, int64_t count, float temperature, float highest, float* weights);
  // The index of the largest weights / e, e of the stream `key` at each index.
  int64_t (*race)(const float* weights, int64_t count, uint64_t key);
};

}  // namespace llmq
