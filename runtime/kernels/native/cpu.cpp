#include "cpu.h"

#include <cpuid.h>

#include <atomic>
#include <cstdint>

namespace llmq {
namespace {

bool has(uint32_t word, int bit) { return word >> bit & 1; }

// XCR0: the register state that the operating system saves.
uint64_t saved_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Intel SDM volume 2A, CPUID; volume 1, 14.5 and 15.2 (detection of AVX2 and AVX-512).
Isa detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::none;
  const bool has_fma = has(c, 12), has_osxsave = has(c, 27), has_f16c = has(c, 29);
  if (!has_osxsave || !has_fma || !has_f16c) return Isa::none;
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6;
  const uint64_t saved = saved_state();
  if ((saved & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, 5)) return Isa::none;
  const bool has_avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) && has(c, 11);  // F, DQ, BW, VL, VNNI
  const bool has_vbmi = has(c, 1);  // as all have that multiply bfloat16 but Cooper Lake
  if (!has_avx512 || (saved & kZmm) != kZmm) return Isa::avx2;
  if (!has_vbmi || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !has(a, 5)) return Isa::avx512_vnni;
  return Isa::avx512_bf16;
}

std::atomic<Isa> current{native_isa()};

}  // namespace

Isa native_isa() {
  static const Isa detected = detect();
  return detected;
}

Isa isa() { return current.load(std::memory_order_relaxed); }

void force_isa(Isa isa) { current.store(isa); }

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512_vnni: return "avx512_vnni";
    case Isa::avx512_bf16: return "avx512_bf16";
    default: return "none";
  }
}

}  // namespace llmq
