#include "linear.h"

#include "cpu.h"

namespace llmq {

using Linear = decltype(linear);
namespace avx2 { Linear linear; }
namespace avx512_vnni { Linear linear; }
namespace avx512_bf16 { Linear linear; }

void linear(const PackedWeight& weight, Activations activations, const uint16_t* x, int64_t num_rows, int64_t x_stride,
            void* y, int64_t y_stride, Output output) {
  if (num_rows <= 0) return;
  Linear& run = isa() == Isa::avx512_bf16   ? avx512_bf16::linear
                : isa() == Isa::avx512_vnni ? avx512_vnni::linear
                                            : avx2::linear;
  run(weight, activations, x, num_rows, x_stride, y, y_stride, output);
}

}  // namespace llmq
