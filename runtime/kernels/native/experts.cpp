#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "pool.h"

namespace llmq {
namespace {

constexpr int64_t kRowsPerTask = 8;

float float_of(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

void Experts::run(Rows x, Rows logits, int64_t num_tokens, Rows out) {
  route(logits, num_tokens);
  sort(num_tokens);
  const int64_t size = hidden(), pairs = num_tokens * per_token_;
  const int64_t wide_size = gated_ ? 2 * size_ : size_, in_size = experts_.front().wide.weight->in_features;
  inputs_.resize(static_cast<size_t>(pairs * in_size));
  wide_.resize(static_cast<size_t>(pairs * wide_size));
  active_.resize(static_cast<size_t>(pairs * size_));
  outputs_.resize(static_cast<size_t>(pairs * size));
  thread_pool().parallel_for(pairs, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t pair = begin; pair < end; pair++) {
      std::memcpy(&inputs_[static_cast<size_t>(place_[static_cast<size_t>(pair)] * in_size)], x[pair / per_token_],
                  static_cast<size_t>(in_size) * sizeof(uint16_t));
    }
  });
  for (size_t index = 0; index < experts_.size(); index++) {
    const int64_t first = first_[index], count = first_[index + 1] - first;
    if (count == 0) continue;
    const Expert& expert = experts_[index];
    uint16_t* wide = wide_.data() + first * wide_size;
    uint16_t* active = active_.data() + first * size_;
    linear(*expert.wide.weight, expert.wide.activations, inputs_.data() + first * in_size, count, in_size, wide,
           wide_size, Output::bf16);
    const ActivateCall call{function_, gated_, size_, {wide, wide_size}, {active, size_}};
    thread_pool().parallel_for(count, kRowsPerTask,
                               [&](int64_t begin, int64_t end, int) { model_kernels().activate(call, begin, end); });
    linear(*expert.out.weight, expert.out.activations, active, count, size_, outputs_.data() + first * size, size,
           Output::bf16);
  }
  const CombineCall call{{outputs_.data(), size}, place_.data(), weights_.data(), per_token_, size, out};
  thread_pool().parallel_for(num_tokens, kRowsPerTask,
                             [&](int64_t begin, int64_t end, int) { model_kernels().combine(call, begin, end); });
}

// Softmax over all experts, then the largest; the first of equal ones.
void Experts::route(Rows logits, int64_t num_tokens) {
  const int64_t count = this->count();
  chosen_.resize(static_cast<size_t>(num_tokens * per_token_));
  weights_.resize(chosen_.size());
  std::vector<float> probability(static_cast<size_t>(count));
  for (int64_t token = 0; token < num_tokens; token++) {
    const uint16_t* row = logits[token];
    float top = -INFINITY, total = 0;
    for (int64_t e = 0; e < count; e++) top = std::max(top, float_of(row[e]));
    for (int64_t e = 0; e < count; e++) {
      const auto at = static_cast<size_t>(e);
      probability[at] = std::exp(float_of(row[e]) - top);
      total += probability[at];
    }
    for (float& one : probability) one /= total;
    float kept = 0;
    for (int choice = 0; choice < per_token_; choice++) {
      const auto best = std::max_element(probability.begin(), probability.end());
      const auto at = static_cast<size_t>(token * per_token_ + choice);
      chosen_[at] = static_cast<int32_t>(best - probability.begin());
      weights_[at] = *best;
      kept += *best;
      *best = -1;
    }
    if (!renormalize_) continue;
    for (int choice = 0; choice < per_token_; choice++) weights_[static_cast<size_t>(token * per_token_ + choice)] /= kept;
  }
}

void Experts::sort(int64_t num_tokens) {
  first_.assign(experts_.size() + 1, 0);
  place_.resize(static_cast<size_t>(num_tokens * per_token_));
  for (const int32_t expert : chosen_) first_[static_cast<size_t>(expert) + 1]++;
  for (size_t index = 1; index < first_.size(); index++) first_[index] += first_[index - 1];
  std::vector<int64_t> next(first_.begin(), first_.end() - 1);
  for (size_t pair = 0; pair < place_.size(); pair++) place_[pair] = next[static_cast<size_t>(chosen_[pair])]++;
}

}  // namespace llmq
