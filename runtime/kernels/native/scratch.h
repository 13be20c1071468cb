#pragma once

#include <cstddef>

namespace llmq {

// Memory of a thread that grows to the most it was asked for, aligned to a cache line. Contents do not last from one
// get() to the next.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  [[gnu::always_inline]] T* get(size_t count) {
    return static_cast<T*>(count * sizeof(T) > size_ ? grow(count * sizeof(T)) : memory_);
  }

 private:
  void* grow(size_t bytes);

  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace llmq
