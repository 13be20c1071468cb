#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

// Memory of `count` numbers that ends where a page begins that nobody may touch. The compiler puts no checks around
// vector instructions with a mask: what those reach for beyond the end faults here.
template <class T>
class Edge {
 public:
  explicit Edge(int64_t count, int filling = 0) : count_(count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), bytes = static_cast<size_t>(count) * sizeof(T);
    const size_t inside = (bytes + page - 1) / page * page;
    size_ = inside + page;
    void* pages = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(static_cast<char*>(pages) + inside, page, PROT_NONE) != 0) std::abort();
    pages_ = static_cast<char*>(pages);
    data_ = reinterpret_cast<T*>(pages_ + inside - bytes);
    std::memset(static_cast<void*>(data_), filling, bytes);
  }
  ~Edge() { munmap(pages_, size_); }
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;

  T* data() { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + count_; }
  T& operator[](int64_t index) { return data_[index]; }

 private:
  int64_t count_;
  size_t size_;
  char* pages_;
  T* data_;
};
