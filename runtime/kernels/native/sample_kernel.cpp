// Compiled once for each instruction set.

#include "sample.h"

#include "f32.h"

namespace llmq::LLMQ_ISA {
namespace {

#include "sample_noise.h"

constexpr int W = F32::kWidth;
constexpr int64_t kChunk = 256;

float largest(const float* x, int64_t count, int64_t* index) {
  float most = -__builtin_inff();
  int64_t first = 0;  // of the chunk in which it is first
  for (int64_t chunk = 0; chunk < count; chunk += kChunk) {
    const int64_t end = least(chunk + kChunk, count);
    F32 top = F32::all(most);
    F32 nan = F32::zero();  // NaN in a lane that met one, or an infinity: a look at each number then says which
    int64_t i = chunk;
    for (; i + W <= end; i += W) {
      const F32 v = F32::load(x + i);
      top = larger(top, v);
      nan = fma(v, F32::zero(), nan);
    }
    float of_chunk = top.largest();
    bool is_odd = nan.any_nan();
    for (; i < end; i++) {
      if (x[i] > of_chunk) of_chunk = x[i];
      is_odd = is_odd || x[i] != x[i];
    }
    if (is_odd) {
      for (i = chunk; i < end; i++) {
        if (x[i] != x[i]) return x[i];
        if (x[i] > of_chunk) of_chunk = x[i];
      }
    }
    if (of_chunk > most) {
      most = of_chunk;
      first = chunk;
    }
  }
  *index = first;
  while (*index + 1 < count && x[*index] != most) ++*index;
  return most;
}

void weigh(const float* x, int64_t count, float temperature, float highest, float* weights) {
  const F32 divisor = F32::all(temperature), top = F32::all(highest) / divisor;
  int64_t i = 0;
  for (; i + W <= count; i += W) exp(F32::load(x + i) / divisor - top).store(weights + i);
  if (i < count) {
    const int n = static_cast<int>(count - i);
    exp(F32::load(x + i, n) / divisor - top).store(weights + i, n);
  }
}

// An exact e = -log(u) is at least 1 - u: of most tokens this is enough to know that they do not win.
int64_t race(const float* weights, int64_t count, uint64_t key) {
  constexpr int64_t kNumbers = 64;
  double best = -1;
  int64_t winner = 0;
  double lead[kNumbers];  // how far above what could win: none is where all are below 0
  for (int64_t begin = 0; begin < count; begin += kNumbers) {
    const int64_t n = least(kNumbers, count - begin);
    double farthest = -1;
    for (int64_t i = 0; i < n; i++) {
      lead[i] = static_cast<double>(weights[begin + i]) - best * (1 - uniform(key, begin + i));
    }
    for (int64_t i = 0; i < n; i++) farthest = most(farthest, lead[i]);
    if (farthest < 0) continue;
    for (int64_t i = 0; i < n; i++) {
      if (lead[i] < 0) continue;
      const double score = static_cast<double>(weights[begin + i]) / -__builtin_log(uniform(key, begin + i));
      if (score > best) {
        best = score;
        winner = begin + i;
      }
    }
  }
  return winner;
}

}  // namespace

extern const SampleKernels sample_kernels;
const SampleKernels sample_kernels = {largest, weigh, race};

}  // namespace llmq::LLMQ_ISA
