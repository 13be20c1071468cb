// Tokens drawn from rows that end where the memory does: of every kind of logits, under every kind of cut.

#include <cmath>
#include <cstdio>
#include <vector>

#include "cpu.h"
#include "edge.h"
#include "pool.h"
#include "sample.h"

using namespace llmq;

namespace {

unsigned state = 1;
unsigned random_below(unsigned n) {
  state = state * 1664525 + 1013904223;
  return (state >> 8) % n;
}

enum Kind { plain, masked, all_masked, ties, has_nan, has_infinity, huge, kKinds };

void fill(float* row, int64_t vocab_size, Kind kind) {
  const auto any = [vocab_size] { return random_below(static_cast<unsigned>(vocab_size)); };
  for (int64_t id = 0; id < vocab_size; id++) {
    row[id] = static_cast<float>(random_below(4096)) / 128.0f - 16.0f;
    if (kind == masked && random_below(8) != 0) row[id] = -INFINITY;
    if (kind == all_masked) row[id] = -INFINITY;
    if (kind == ties) row[id] = static_cast<float>(random_below(2));
    if (kind == huge) row[id] = random_below(2) ? -3e38f : 3e38f;  // a quotient by a temperature below 1 is infinite
  }
  if (kind == masked) row[any()] = 1.0f;
  if (kind == has_nan) row[any()] = NAN;
  if (kind == has_infinity) row[any()] = INFINITY;
}

bool draw(int64_t num_rows, int64_t vocab_size, int64_t stride) {
  Edge<float> logits((num_rows - 1) * stride + vocab_size, 0xff), highest(num_rows);
  Edge<Draw> draws(num_rows);
  Edge<int64_t> token_ids(num_rows);
  std::vector<Kind> kinds;
  const auto size = static_cast<unsigned>(vocab_size);
  for (int64_t row = 0; row < num_rows; row++) {
    kinds.push_back(static_cast<Kind>(random_below(kKinds)));
    fill(logits.data() + row * stride, vocab_size, kinds.back());
    const int64_t top_ks[] = {0, 1, 1 + random_below(size), vocab_size, vocab_size + 1 + random_below(1000)};
    const double top_ps[] = {1, 0.9, 0.5, 1e-9, 0};
    const float min_ps[] = {0, 0.05f, 1}, temperatures[] = {0, 1e-4f, 0.7f, 1, 2};
    draws[row] = {state * 0x9E3779B97F4A7C15ull, static_cast<int64_t>(random_below(1 << 20)), top_ks[random_below(5)],
                  top_ps[random_below(5)], min_ps[random_below(3)], temperatures[random_below(5)]};
  }
  sample(logits.data(), num_rows, vocab_size, stride, draws.data(), token_ids.data(), highest.data());
  for (int64_t row = 0; row < num_rows; row++) {
    const Kind kind = kinds[static_cast<size_t>(row)];
    if (std::isfinite(highest[row]) != (kind != all_masked && kind != has_nan && kind != has_infinity)) return false;
    if (!std::isfinite(highest[row])) continue;
    if (token_ids[row] < 0 || token_ids[row] >= vocab_size) return false;
    if (kind == masked && logits[row * stride + token_ids[row]] == -INFINITY) return false;
    if (kind == huge && logits[row * stride + token_ids[row]] != highest[row]) return false;
  }
  return true;
}

}  // namespace

int main() {
  thread_pool().resize(3);
  for (Isa one : {Isa::avx2, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx, Isa::amx_emulated}) {
    if (!runs_here(one)) continue;
    force_isa(one);
    for (int turn = 0; turn < 400; turn++) {
      const int64_t vocab_size = turn < 70 ? 1 + turn : 1 + random_below(turn % 20 == 0 ? 40000 : 1500);
      const int64_t num_rows = turn % 3 == 0 ? 1 : 1 + random_below(12);
      if (!draw(num_rows, vocab_size, vocab_size + (turn % 2 ? random_below(5) : 0))) {
        std::fprintf(stderr, "%s, turn %d: a token that is none\n", name_of(one), turn);
        return 1;
      }
    }
    std::printf("%s ok\n", name_of(one));
  }
}
