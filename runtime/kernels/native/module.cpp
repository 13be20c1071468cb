// llmq's native kernels. No torch, no OpenMP: tensors come as addresses, threads are the pool's own.

#include <stdexcept>
#include <string>

#include "bindings.h"
#include "cpu.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_native, module) {
  using namespace llmq;
  module.def("native_isa", [] { return name_of(native_isa()); }, "What this CPU's kernels are compiled for.");
  module.def("isa", [] { return name_of(isa()); }, "What the kernels that run are compiled for.");
  module.def(
      "force_isa",
      [](const char* name) {
        for (Isa one : {Isa::avx2, Isa::avx512_vnni, Isa::avx512_bf16}) {
          if (std::string(name) == name_of(one) && one <= native_isa()) return force_isa(one);
        }
        throw nb::value_error((std::string(name) + ": this CPU runs up to " + name_of(native_isa())).c_str());
      },
      "name"_a, "Run a lesser kernel than the CPU's own. For tests: a process has one at a time.");
  module.def("num_threads", [] { return thread_pool().num_threads(); });
  module.def(
      "set_num_threads",
      [](int num_threads) {
        if (num_threads < 1) throw nb::value_error("at least one thread");
        nb::gil_scoped_release release;
        thread_pool().resize(num_threads);
      },
      "num_threads"_a);
  bind_linear(module);
  bind_attention(module);
  bind_program(module);
  bind_sample(module);
}
