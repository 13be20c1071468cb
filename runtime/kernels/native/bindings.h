#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace llmq {

// Tensors come as the integers of Tensor.data_ptr(): a call costs half a microsecond. What they point to is the
// caller's to check and to keep alive.
template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_linear(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_program(nanobind::module_& module);
void bind_sample(nanobind::module_& module);

}  // namespace llmq
