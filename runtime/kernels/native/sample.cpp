#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu.h"
#include "pool.h"
#include "scratch.h"

namespace llmq {

namespace avx2 { extern const SampleKernels sample_kernels; }
namespace avx512_vnni { extern const SampleKernels sample_kernels; }
namespace avx512_bf16 { extern const SampleKernels sample_kernels; }

namespace {

#include "sample_noise.h"

const SampleKernels& kernels() {
  const Isa isa = isa_without_tiles();
  return isa == Isa::avx512_bf16   ? avx512_bf16::sample_kernels
         : isa == Isa::avx512_vnni ? avx512_vnni::sample_kernels
                                   : avx2::sample_kernels;
}

struct Token {
  float weight;
  int64_t id;
};

// The order in which tokens are cut off: from the likeliest down, of equal ones the first first.
bool comes_before(const Token& a, const Token& b) { return a.weight > b.weight || (a.weight == b.weight && a.id < b.id); }

// Weights in (0, 1] by their size: 64 bins an octave, and one for all below 2^-32.
constexpr uint32_t kLowest = (127 - 32) << 6;
constexpr int64_t kBins = (uint32_t{127} << 6) - kLowest + 2;

int64_t bin_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, 4);
  const uint32_t size = bits >> 17;
  return size < kLowest ? 0 : size - kLowest + 1;
}

// The tokens of a row in the order of their weights, of which only those are sorted that a border falls among.
class Ordered {
 public:
  Ordered(const float* weights, int64_t count) : weights_(weights), count_(count), bins_(kBins) {
    for (int64_t id = 0; id < count; id++) {
      Bin& bin = bins_[static_cast<size_t>(bin_of(weights[id]))];
      bin.count++;
      bin.mass += weights[id];
    }
    for (const Bin& bin : bins_) total_ += bin.mass;
  }

  double total() const { return total_; }

  // The last token of the smallest head that `is_enough(tokens in it, their mass)`, and that mass; all of them where
  // none is.
  template <class Enough>
  Token last_of_head(Enough&& is_enough, double* mass_of_head) const {
    int64_t tokens = 0;
    double mass = 0;
    for (int64_t bin = kBins - 1; bin >= 0; bin--) {
      const Bin& one = bins_[static_cast<size_t>(bin)];
      if (one.count == 0) continue;
      if (is_enough(tokens + one.count, mass + one.mass)) {
        for (const Token& token : sorted(bin)) {
          mass += token.weight;
          if (is_enough(++tokens, mass)) {
            *mass_of_head = mass;
            return token;
          }
        }
      } else {
        tokens += one.count;
        mass += one.mass;
      }
    }
    *mass_of_head = mass;
    return {0, count_};
  }

 private:
  struct Bin {
    int64_t count = 0;
    double mass = 0;
  };

  std::vector<Token> sorted(int64_t bin) const {
    std::vector<Token> tokens;
    for (int64_t id = 0; id < count_; id++) {
      if (bin_of(weights_[id]) == bin) tokens.push_back({weights_[id], id});
    }
    std::sort(tokens.begin(), tokens.end(), comes_before);
    return tokens;
  }

  const float* weights_;
  int64_t count_;
  double total_ = 0;
  std::vector<Bin> bins_;
};

// The last token that top-k, then top-p of what that leaves, then min-p leave.
Token last_to_keep(const float* weights, int64_t count, const Draw& draw) {
  Token last{0, count};
  if (draw.top_k > 0 || draw.top_p < 1) {
    const Ordered ordered(weights, count);
    double total = ordered.total();
    if (draw.top_k > 0) {
      last = ordered.last_of_head([&](int64_t tokens, double) { return tokens >= draw.top_k; }, &total);
    }
    if (draw.top_p < 1) {
      double mass;
      const Token other = ordered.last_of_head([&](int64_t, double head) { return head >= draw.top_p * total; }, &mass);
      last = comes_before(other, last) ? other : last;
    }
  }
  if (draw.min_p > last.weight) last = {draw.min_p, count};
  return last;
}

int64_t draw_token(const float* logits, int64_t count, const Draw& draw, float highest) {
  thread_local Scratch memory;
  float* weights = memory.get<float>(static_cast<size_t>(count));
  kernels().weigh(logits, count, draw.temperature, highest, weights);
  const uint64_t key = mix(mix(draw.seed) + static_cast<uint64_t>(draw.position) * 0x9E3779B97F4A7C15ull);
  if (draw.top_k == 0 && draw.top_p >= 1 && draw.min_p <= 0) return kernels().race(weights, count, key);
  const Token last = last_to_keep(weights, count, draw);
  double best = -1;
  int64_t winner = 0;
  for (int64_t id = 0; id < count; id++) {
    if (weights[id] < last.weight || (weights[id] == last.weight && id > last.id)) continue;
    const double score = static_cast<double>(weights[id]) / -std::log(uniform(key, id));
    if (score > best) {
      best = score;
      winner = id;
    }
  }
  return winner;
}

}  // namespace

void sample(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t stride, const Draw* draws,
            int64_t* token_ids, float* highest) {
  thread_pool().parallel_for(num_rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; row++) {
      const float* x = logits + row * stride;
      highest[row] = kernels().largest(x, vocab_size, &token_ids[row]);
      // Where the quotient overflows, weights would be no numbers: what has so large logits draws the likeliest.
      if (draws[row].temperature > 0 && std::isfinite(highest[row] / draws[row].temperature)) {
        token_ids[row] = draw_token(x, vocab_size, draws[row], highest[row]);
      }
    }
  });
}

}  // namespace llmq
