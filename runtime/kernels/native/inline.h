#pragma once

// What is a few instructions on vectors: as a call it would pass them through memory, and GCC at times prefers a call.
#define LLMQ_INLINE [[gnu::always_inline]] inline

namespace llmq {

// body(0) … body(N - 1), each a call with a constant: GCC keeps an array in registers only where no loop that it unrolls
// late has an index of it. body: [&](int i) LLMQ_UNROLLED { … }
#define LLMQ_UNROLLED __attribute__((always_inline))
template <int N, class Body>
LLMQ_INLINE void unrolled(Body&& body) {
  if constexpr (N > 0) {
    unrolled<N - 1>(body);
    body(N - 1);
  }
}

}  // namespace llmq
