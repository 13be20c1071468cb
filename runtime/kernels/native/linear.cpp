#include "linear.h"

#include "cpu.h"

namespace llmq {

using Linear = decltype(linear);
namespace avx2 { Linear linear; }
namespace avx512_vnni { Linear linear; }
namespace avx512_bf16 { Linear linear; }
#ifdef LLMQ_HAS_AMX
namespace amx { Linear linear; }
#endif
namespace amx_emulated { Linear linear; }

namespace {

Linear* linear_of(Isa isa) {
  switch (isa) {
    case Isa::amx_emulated: return amx_emulated::linear;
#ifdef LLMQ_HAS_AMX
    case Isa::amx: return amx::linear;
#endif
    case Isa::avx512_bf16: return avx512_bf16::linear;
    case Isa::avx512_vnni: return avx512_vnni::linear;
    default: return avx2::linear;
  }
}

}  // namespace

void linear(const PackedWeight& weight, Activations activations, const uint16_t* x, int64_t num_rows, int64_t x_stride,
            void* y, int64_t y_stride, Output output) {
  if (num_rows <= 0) return;
  linear_of(isa())(weight, activations, x, num_rows, x_stride, y, y_stride, output);
}

}  // namespace llmq
