#pragma once

// What is a few instructions on vectors: as a call it would pass them through memory, and GCC at times prefers a call.
#define LLMQ_INLINE [[gnu::always_inline]] inline
