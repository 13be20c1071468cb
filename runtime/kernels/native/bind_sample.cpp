#include "bindings.h"
#include "sample.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmq {

// As numpy lays out runtime/sampling/on_cpu.py's records: without gaps the compiler leaves none either.
static_assert(sizeof(Draw) == 40);

void bind_sample(nb::module_& module) {
  module.def(
      "sample",
      [](uintptr_t logits, int64_t num_rows, int64_t vocab_size, int64_t stride, uintptr_t draws, uintptr_t token_ids,
         uintptr_t highest) {
        nb::gil_scoped_release release;
        sample(pointer<float>(logits), num_rows, vocab_size, stride, pointer<Draw>(draws), pointer<int64_t>(token_ids),
               pointer<float>(highest));
      },
      "logits"_a, "num_rows"_a, "vocab_size"_a, "stride"_a, "draws"_a, "token_ids"_a, "highest"_a,
      "A token of each row of logits, float32 [num_rows, vocab_size]; see sample.h.");
}

}  // namespace llmq
