// A sparse mixture of experts: each token goes through a few of many MLPs (Shazeer et al. 2017, arXiv 1701.06538).
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"
#include "row_kernels.h"

namespace llmq {

struct ExpertLinear {
  const PackedWeight* weight;
  Activations activations;
};

struct Expert {
  ExpertLinear wide, out;  // out(activate(wide(x)))
};

// Tokens are sorted by expert, so that each expert that is asked multiplies all its rows at once. A row of the result
// does not depend on the others.
class Experts {
 public:
  // per_token: experts of a token, those of the highest probability, weighted by it; renormalize: to a sum of 1.
  // size: of what an expert's activation makes.
  Experts(std::vector<Expert> experts, int per_token, bool renormalize, ActivationFunction function, bool gated,
          int64_t size)
      : experts_(std::move(experts)), per_token_(per_token), renormalize_(renormalize), function_(function),
        gated_(gated), size_(size) {}

  // x: [num_tokens, hidden], logits: of the router, [num_tokens, experts], out: as x. bfloat16.
  void run(Rows x, Rows logits, int64_t num_tokens, Rows out);

  int64_t hidden() const { return experts_.front().out.weight->out_features; }
  int64_t count() const { return static_cast<int64_t>(experts_.size()); }

 private:
  void route(Rows logits, int64_t num_tokens);
  void sort(int64_t num_tokens);

  std::vector<Expert> experts_;
  int per_token_;
  bool renormalize_;
  ActivationFunction function_;
  bool gated_;
  int64_t size_;
  // Of one run. A pair is a token and one of its choices.
  std::vector<int32_t> chosen_;    // [token, choice]: an expert
  std::vector<float> weights_;     // likewise
  std::vector<int64_t> first_;     // [expert + 1]: where its pairs begin, sorted
  std::vector<int64_t> place_;     // [token, choice]: where it is, sorted
  std::vector<uint16_t> inputs_, wide_, active_, outputs_;  // [sorted pair, width]
};

}  // namespace llmq
