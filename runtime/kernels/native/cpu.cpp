#include "cpu.h"

#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>

namespace llmq {
namespace {

bool has(uint32_t word, int bit) { return word >> bit & 1; }

uint64_t xcr0() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Linux keeps the 8 KB of tiles from a process that has not asked for them, so that no thread's state grows unasked; it
// refuses where a signal stack is too small for them. Permission is the process's, and its children's.
bool ask_for_tiles() {
#if defined(LLMQ_HAS_AMX) && defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

Isa detect() {
  uint32_t a, b, c, d;
  CpuFacts facts{};
  if (!__get_cpuid(1, &a, &b, &facts.leaf_1_ecx, &d)) return Isa::none;
  if (has(facts.leaf_1_ecx, 27)) facts.xcr0 = xcr0();
  __get_cpuid_count(7, 0, &a, &facts.leaf_7_ebx, &facts.leaf_7_ecx, &facts.leaf_7_edx);
  // A CPU without this subleaf gives zeros.
  __get_cpuid_count(7, 1, &facts.leaf_7_1_eax, &b, &c, &d);
  return isa_of(facts, ask_for_tiles);
}

std::atomic<Isa> current{native_isa()};

}  // namespace

// Intel SDM volume 2A, CPUID; volume 1, 14.5, 15.2 and 18.2 (detection of AVX2, AVX-512 and AMX).
Isa isa_of(const CpuFacts& facts, bool (*may_use_tiles)()) {
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  const uint32_t b = facts.leaf_7_ebx, c = facts.leaf_7_ecx, d = facts.leaf_7_edx;
  const auto saves = [&](uint64_t state) { return (facts.xcr0 & state) == state; };
  const bool has_fma = has(facts.leaf_1_ecx, 12), has_f16c = has(facts.leaf_1_ecx, 29);
  if (!has_fma || !has_f16c || !has(b, 5) || !saves(kYmm)) return Isa::none;
  const bool has_avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) && has(c, 11);  // F, DQ, BW, VL, VNNI
  if (!has_avx512 || !saves(kZmm)) return Isa::avx2;
  const bool has_vbmi = has(c, 1);  // as all have that multiply bfloat16 but Cooper Lake
  if (!has_vbmi || !has(facts.leaf_7_1_eax, 5)) return Isa::avx512_vnni;
  const bool has_amx = has(d, 24) && has(d, 25) && has(d, 22);  // TILE, INT8, BF16
  if (!has_amx || !saves(kTiles) || !may_use_tiles()) return Isa::avx512_bf16;
  return Isa::amx;
}

Isa native_isa() {
  static const Isa detected = detect();
  return detected;
}

Isa isa() { return current.load(std::memory_order_relaxed); }

void force_isa(Isa isa) { current.store(isa); }

bool runs_here(Isa isa) {
  if (isa == Isa::amx_emulated) return native_isa() >= Isa::avx2;
  return isa != Isa::none && isa <= native_isa();
}

Isa isa_without_tiles() {
  const Isa one = isa();
  return one == Isa::amx ? Isa::avx512_bf16 : one == Isa::amx_emulated ? Isa::avx2 : one;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512_vnni: return "avx512_vnni";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::amx: return "amx";
    case Isa::amx_emulated: return "amx_emulated";
    default: return "none";
  }
}

}  // namespace llmq
