#pragma once

namespace llmq {

// What kernels are compiled for, each a superset of the one before.
enum class Isa {
  none,         // no kernel runs here
  avx2,         // and FMA, F16C
  avx512_vnni,  // F, BW, DQ, VL and VNNI: Cascade Lake, Ice Lake
  avx512_bf16,  // and BF16: Cooper Lake, Sapphire Rapids, Zen 4
};

// The best one of this CPU and operating system.
Isa native_isa();

// The one whose kernels run: native_isa(), or the lesser one that was forced.
Isa isa();
void force_isa(Isa isa);

const char* name_of(Isa isa);

}  // namespace llmq
