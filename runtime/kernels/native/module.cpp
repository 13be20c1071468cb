// llmq's native kernels. No torch, no OpenMP: tensors come as addresses, threads are the pool's own.

#include <stdexcept>
#include <string>

#include "bindings.h"
#include "cpu.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr llmq::Isa kIsas[] = {llmq::Isa::avx2, llmq::Isa::avx512_vnni, llmq::Isa::avx512_bf16, llmq::Isa::amx,
                               llmq::Isa::amx_emulated};

}  // namespace

NB_MODULE(_native, module) {
  using namespace llmq;
  module.def("native_isa", [] { return name_of(native_isa()); }, "What this CPU's kernels are compiled for.");
  module.def("isa", [] { return name_of(isa()); }, "What the kernels that run are compiled for.");
  module.def(
      "isas",
      [] {
        nb::list names;
        for (Isa one : kIsas) {
          if (runs_here(one)) names.append(name_of(one));
        }
        return names;
      },
      "What force_isa takes here.");
  module.def(
      "isa_of",
      [](uint32_t leaf_1_ecx, uint32_t leaf_7_ebx, uint32_t leaf_7_ecx, uint32_t leaf_7_edx, uint32_t leaf_7_1_eax,
         uint64_t xcr0, bool may_use_tiles) {
        const CpuFacts facts{leaf_1_ecx, leaf_7_ebx, leaf_7_ecx, leaf_7_edx, leaf_7_1_eax, xcr0};
        return name_of(may_use_tiles ? isa_of(facts, [] { return true; }) : isa_of(facts, [] { return false; }));
      },
      "leaf_1_ecx"_a, "leaf_7_ebx"_a, "leaf_7_ecx"_a, "leaf_7_edx"_a, "leaf_7_1_eax"_a, "xcr0"_a, "may_use_tiles"_a,
      "What native_isa() were, if this were CPUID's and the system's answer.");
  module.def(
      "force_isa",
      [](const char* name) {
        for (Isa one : kIsas) {
          if (std::string(name) == name_of(one) && runs_here(one)) return force_isa(one);
        }
        throw nb::value_error((std::string(name) + ": this CPU runs up to " + name_of(native_isa())).c_str());
      },
      "name"_a, "Run other kernels than the CPU's own. For tests: a process has one at a time.");
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
