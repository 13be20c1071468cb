// Numbers of K and V, from their blocks into the units that an inner product consumes.
#pragma once

#include "kv_plane.h"
#include "f32.h"

namespace llmq::LLMQ_ISA {

// e4m3 -> float32, through float16: the exponents differ by 2^8, and float16 has all of e4m3's subnormals.
static inline F32 load_float8(const uint8_t* p, int n) {
  uint16_t half[F32::kWidth];
  for (int i = 0; i < n; ++i) {
    const uint16_t code = p[i];
    const uint16_t magnitude = code & 0x7f;
    half[i] = static_cast<uint16_t>((code & 0x80) << 8 | (magnitude == 0x7f ? 0x7e00 : magnitude << 7));
  }
  return F32::load_half(half, n) * F32::all(256.0f);
}

// n numbers of a head from the d-th on, as stored, before their scale.
template <KVFormat kFormat>
static inline F32 load_stored(const uint8_t* head, int head_dim, int d, int n) {
  if constexpr (kFormat == KVFormat::fp32) return F32::load(reinterpret_cast<const float*>(head) + d, n);
  if constexpr (kFormat == KVFormat::fp16) return F32::load_half(reinterpret_cast<const uint16_t*>(head) + d, n);
  if constexpr (kFormat == KVFormat::bf16) return F32::load(reinterpret_cast<const bf16*>(head) + d, n);
  if constexpr (kFormat == KVFormat::int8) return F32::load_int8(reinterpret_cast<const int8_t*>(head) + d, n);
  if constexpr (kFormat == KVFormat::fp8) {
#if defined(__AVX512F__)
    const __m256i code = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(F32::mask(n), head + d));
    const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
    const __m256i half = _mm256_mask_mov_epi16(_mm256_slli_epi16(magnitude, 7),
                                               _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f)),
                                               _mm256_set1_epi16(0x7e00));
    return F32{_mm512_cvtph_ps(_mm256_or_si256(half, sign))} * F32::all(256.0f);
#else
    return load_float8(head + d, n);
#endif
  }
  if constexpr (kFormat == KVFormat::int4) {
    // The first half of a head in the low nibbles; a vector may lie on both sides of the middle.
    int8_t numbers[F32::kWidth];
    const int half = head_dim / 2;
    for (int i = 0; i < n; ++i) {
      const int at = d + i;
      numbers[i] = static_cast<int8_t>((at < half ? head[at] & 15 : head[at - half] >> 4) - 8);
    }
    return F32::load_int8(numbers, n);
  }
}

// A unit is what one lane multiplies at a time: a float, or two bfloat16 whose products a lane adds.
struct FloatUnits {
  using Unit = float;
  static constexpr int kDepth = 1;  // numbers in a unit

  static F32 add_product(F32 sum, float a, F32 b) { return fma(F32::all(a), b, sum); }
  static F32 load_products(const float* p) { return F32::load(p); }
  static void store_weights(F32 p, float* to, int at) { p.store(to + at); }

  // Units [first, first + count) of a head; 0 beyond them.
  template <KVFormat kFormat>
  static F32 load_units(const uint8_t* head, int head_dim, int first, int count) {
    return load_stored<kFormat>(head, head_dim, first, count);
  }
  // A unit for each number of a head, of kDepth keys.
  template <KVFormat kFormat>
  static void join_keys(const uint8_t* const* heads, int head_dim, float* to) {
    for (int d = 0; d < head_dim; d += F32::kWidth) {
      const int n = least(F32::kWidth, head_dim - d);
      load_stored<kFormat>(heads[0], head_dim, d, n).store(to + d, n);
    }
  }
};

#if defined(__AVX512BF16__)

struct PairUnits {
  using Unit = uint32_t;
  static constexpr int kDepth = 2;

  static F32 add_product(F32 sum, uint32_t a, F32 b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b.v)};
  }
  static F32 load_products(const uint32_t* p) { return {_mm512_castsi512_ps(_mm512_loadu_si512(p))}; }
  static void store_weights(F32 p, uint32_t* to, int at) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(to) + at),
                        (__m256i)_mm512_cvtneps_pbh(p.v));
  }

  template <KVFormat kFormat>
  static F32 load_units(const uint8_t* head, int head_dim, int first, int count) {
    if constexpr (kFormat == KVFormat::bf16) {
      return {_mm512_castsi512_ps(
          _mm512_maskz_loadu_epi32(F32::mask(count), reinterpret_cast<const uint32_t*>(head) + first))};
    }
    if constexpr (kFormat == KVFormat::fp8) {
      const __m256i codes = _mm256_maskz_loadu_epi8(static_cast<__mmask32>((uint64_t{1} << 2 * count) - 1), head + 2 * first);
      return {_mm512_castsi512_ps(float8_to_bf16(_mm512_cvtepu8_epi16(codes)))};
    }
    if (kFormat == KVFormat::int8 && count == F32::kWidth) {
      const __m128i* bytes = reinterpret_cast<const __m128i*>(head + 2 * first);
      return joined(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes))),
                    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1))));
    }
    const int low = least(2 * count, F32::kWidth), high = 2 * count - low;
    const F32 a = load_stored<kFormat>(head, head_dim, 2 * first, low);
    const F32 b = high == 0 ? F32::zero() : load_stored<kFormat>(head, head_dim, 2 * first + F32::kWidth, high);
    return joined(a.v, b.v);
  }
  template <KVFormat kFormat>
  static void join_keys(const uint8_t* const* heads, int head_dim, uint32_t* to) {
    const __m512i low = _mm512_add_epi32(lanes(), _mm512_slli_epi32(_mm512_add_epi32(lanes(), _mm512_set1_epi32(32)), 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int first = 0; first < head_dim; first += 32) {
      const int n = least(32, head_dim - first);
      const __m512i a = _mm512_castps_si512(load_units<kFormat>(heads[0], head_dim, first / 2, n / 2).v);
      const __m512i b = _mm512_castps_si512(load_units<kFormat>(heads[1], head_dim, first / 2, n / 2).v);
      _mm512_mask_storeu_epi32(to + first, F32::mask(least(n, 16)), _mm512_permutex2var_epi16(a, low, b));
      if (n > 16) _mm512_mask_storeu_epi32(to + first + 16, F32::mask(n - 16), _mm512_permutex2var_epi16(a, high, b));
    }
  }

 private:
  // Integers of eight bits and fewer are exact in bfloat16.
  static F32 joined(__m512 low, __m512 high) {
    return {_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low))};
  }
  // e4m3 in the low byte of each word -> bfloat16. The product of bfloat16 takes subnormals as 0: e4m3's own are looked
  // up, the others' exponents moved.
  static __m512i float8_to_bf16(__m512i codes) {
    const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), codes), 8);
    __m512i moved = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    // m · 2^-9 for m from 0 to 7
    const __m512i subnormal = _mm512_set4_epi32(0x3c603c40, 0x3c203c00, 0x3bc03b80, 0x3b000000);
    moved = _mm512_mask_permutexvar_epi16(moved, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude,
                                          subnormal);
    moved = _mm512_mask_mov_epi16(moved, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)),
                                  _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(moved, sign);
  }
  static __m512i lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
};

#endif

#if defined(__AVX512F__)

// rows[i] lane j <-> rows[j] lane i
static inline void transpose(F32 (&rows)[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  // b[4 i + j], lanes 4 k … of it: column 4 k + j of rows 4 i …
  for (int j = 0; j < 4; ++j) {
    const __m512 low01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), high01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
    const __m512 low23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
    const __m512 high23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    rows[j].v = _mm512_shuffle_f32x4(low01, low23, 0x88);
    rows[4 + j].v = _mm512_shuffle_f32x4(high01, high23, 0x88);
    rows[8 + j].v = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    rows[12 + j].v = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
}

#else

// rows[i] lane j <-> rows[j] lane i
static inline void transpose(F32 (&rows)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
    }
  }
  for (int j = 0; j < 4; ++j) {
    rows[j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    rows[4 + j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  }
}

#endif

}  // namespace llmq::LLMQ_ISA
