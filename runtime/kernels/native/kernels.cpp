#include "kernels.h"

#include "cpu.h"

namespace llmq {

const ModelKernels& model_kernels() {
  const Isa isa = isa_without_tiles();
  return isa == Isa::avx512_bf16   ? avx512_bf16::model_kernels
         : isa == Isa::avx512_vnni ? avx512_vnni::model_kernels
                                   : avx2::model_kernels;
}

}  // namespace llmq
