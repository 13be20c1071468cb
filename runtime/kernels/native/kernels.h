// Functions of one instruction set, and the choice among sets.
#pragma once

#include "attention.h"
#include "row_kernels.h"

namespace llmq {

#if defined(LLMQ_ISA)
namespace LLMQ_ISA {
void attend(const AttentionWork& work);
}  // namespace LLMQ_ISA
#endif

namespace avx2 { extern const ModelKernels model_kernels; }
namespace avx512_vnni { extern const ModelKernels model_kernels; }
namespace avx512_bf16 { extern const ModelKernels model_kernels; }

// Of the instruction set that is in use.
const ModelKernels& model_kernels();

}  // namespace llmq
