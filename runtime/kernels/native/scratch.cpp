#include "scratch.h"

#include <cstdlib>
#include <new>

namespace llmq {

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::grow(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  std::free(memory_);
  memory_ = std::aligned_alloc(64, bytes);
  size_ = memory_ ? bytes : 0;
  if (!memory_) throw std::bad_alloc();
  return memory_;
}

}  // namespace llmq
