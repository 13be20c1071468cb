#pragma once

#include <cstdint>

namespace llmq {

// What kernels are compiled for, each a superset of the one before; but for the last.
enum class Isa {
  none,          // no kernel runs here
  avx2,          // and FMA, F16C
  avx512_vnni,   // F, BW, DQ, VL and VNNI: Cascade Lake, Ice Lake
  avx512_bf16,   // and BF16: Cooper Lake, Sapphire Rapids, Zen 4
  amx,           // and tiles of int8 and bf16: Sapphire Rapids. Emulated in tests; not measured on hardware.
  amx_emulated,  // amx's tiles in C++, on AVX2: for tests, where it is forced
};

// The best one of this CPU and operating system. The first call asks Linux to let the process use tiles.
Isa native_isa();

// The one whose kernels run: native_isa(), or another that was forced.
Isa isa();
void force_isa(Isa isa);
bool runs_here(Isa isa);

// Whose kernels run what tiles are of no use to.
Isa isa_without_tiles();

const char* name_of(Isa isa);

// What native_isa() is found from: words of CPUID, and XCR0, the register state that the operating system saves.
struct CpuFacts {
  uint32_t leaf_1_ecx, leaf_7_ebx, leaf_7_ecx, leaf_7_edx, leaf_7_1_eax;
  uint64_t xcr0;
};
// may_use_tiles is asked only where nothing else is missing.
Isa isa_of(const CpuFacts& facts, bool (*may_use_tiles)());

}  // namespace llmq
