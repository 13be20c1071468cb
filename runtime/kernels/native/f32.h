// Vectors of float32 for kernels that are compiled once for each instruction set.
//
// Everything here and in what includes it lives in a namespace named after the instruction set (LLMQ_ISA, given by the
// build), and uses no template of the standard library: an inline function that the linker took from another set's
// object file would run instructions that the machine does not have.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace llmq::LLMQ_ISA {

using bf16 = uint16_t;

template <class T> static constexpr T least(T a, T b) { return a < b ? a : b; }
template <class T> static constexpr T most(T a, T b) { return a < b ? b : a; }

static inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// To the nearest, ties to even; a NaN stays one.
static inline bf16 to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct F32 {
  static constexpr int kWidth = 16;
  static constexpr float kLeastPower = -160.0f;  // `times_power` of it is 0
  __m512 v;

  static F32 zero() { return {_mm512_setzero_ps()}; }
  static F32 all(float x) { return {_mm512_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F32 load(const bf16* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  // The first n numbers, 0 < n <= kWidth; the others are 0.
  static F32 load(const float* p, int n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
  static F32 load(const bf16* p, int n) { return widened(_mm256_maskz_loadu_epi16(mask(n), p)); }
  static F32 load_half(const uint16_t* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p))}; }
  static F32 load_int8(const int8_t* p, int n) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask(n), p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed()); }
  void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
  void store(bf16* p, int n) const { _mm256_mask_storeu_epi16(p, mask(n), narrowed()); }
  void store_half(uint16_t* p, int n) const {
    _mm256_mask_storeu_epi16(p, mask(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  F32 rounded_to_bf16() const { return widened(narrowed()); }
  // To the nearest whole number, ties to even.
  F32 whole() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  F32 magnitude() const { return {_mm512_abs_ps(v)}; }
  F32 root() const { return {_mm512_sqrt_ps(v)}; }
  bool any_nan() const { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float largest() const { return _mm512_reduce_max_ps(v); }
  // 2^n · this, for whole n.
  F32 times_power(F32 n) const { return {_mm512_scalef_ps(v, n.v)}; }

  static __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1); }
  static F32 widened(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
  // Of pairs of bfloat16 in the lanes.
  F32 lower_bf16() const { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16))}; }
  F32 upper_bf16() const {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(~0xffff)))};
  }
  __m256i narrowed() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(rounded);
  }
};

static inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of a NaN and a number, the second operand.
static inline F32 smaller(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F32 larger(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
// a where x < limit, else b.
static inline F32 where_below(F32 x, F32 limit, F32 a, F32 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), b.v, a.v)};
}

#else  // AVX2, FMA and F16C

struct F32 {
  static constexpr int kWidth = 8;
  static constexpr float kLeastPower = -127.0f;  // `times_power` of it is 0
  __m256 v;

  static F32 zero() { return {_mm256_setzero_ps()}; }
  static F32 all(float x) { return {_mm256_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static F32 load(const bf16* p) { return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  // The first n numbers, 0 < n <= kWidth; the others are 0.
  static F32 load(const float* p, int n) { return {_mm256_maskload_ps(p, mask(n))}; }
  static F32 load(const bf16* p, int n) { return widened(words(p, n)); }
  static F32 load_half(const uint16_t* p, int n) { return {_mm256_cvtph_ps(words(p, n))}; }
  static F32 load_int8(const int8_t* p, int n) {
    int64_t bytes = 0;
    if (n == kWidth) {
      memcpy(&bytes, p, 8);
    } else {
      memcpy(&bytes, p, static_cast<size_t>(n));
    }
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(bf16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrowed()); }
  void store(float* p, int n) const { _mm256_maskstore_ps(p, mask(n), v); }
  void store(bf16* p, int n) const { store_words(p, narrowed(), n); }
  void store_half(uint16_t* p, int n) const {
    store_words(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
  }

  F32 rounded_to_bf16() const { return widened(narrowed()); }
  // To the nearest whole number, ties to even.
  F32 whole() const { return {_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  F32 magnitude() const { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v)}; }
  F32 root() const { return {_mm256_sqrt_ps(v)}; }
  bool any_nan() const { return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0; }
  float sum() const {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
  }
  float largest() const {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
  }
  // 2^n · this, for whole n from -127 (which gives 0) to 127.
  F32 times_power(F32 n) const {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
  }

  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m128i words(const uint16_t* p, int n) {
    if (n == kWidth) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    uint16_t copy[kWidth] = {};
    memcpy(copy, p, static_cast<size_t>(n) * 2);
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(copy));
  }
  static void store_words(uint16_t* p, __m128i words, int n) {
    uint16_t copy[kWidth];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(copy), words);
    memcpy(p, copy, static_cast<size_t>(n) * 2);
  }
  static F32 widened(__m128i x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))}; }
  // Of pairs of bfloat16 in the lanes.
  F32 lower_bf16() const { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16))}; }
  F32 upper_bf16() const {
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(~0xffff)))};
  }
  __m128i narrowed() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    const __m256i packed = _mm256_packus_epi32(rounded, rounded);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
};

static inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// Of a NaN and a number, the second operand.
static inline F32 smaller(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline F32 larger(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
// a where x < limit, else b.
static inline F32 where_below(F32 x, F32 limit, F32 a, F32 b) {
  return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ))};
}

#endif

// 2^x of x <= 0, by the polynomial of degree 5 around the nearest whole number whose largest relative error, 1e-7, is the
// least.
static inline F32 exp2_of_negative(F32 x) {
  x = larger(F32::all(F32::kLeastPower), x);
  const F32 n = x.whole(), f = x - n;
  F32 p = F32::all(1.3264727e-3f);
  p = fma(p, f, F32::all(9.6715129e-3f));
  p = fma(p, f, F32::all(5.5507337e-2f));
  p = fma(p, f, F32::all(2.4022242e-1f));
  p = fma(p, f, F32::all(6.9314698e-1f));
  p = fma(p, f, F32::all(1.0f));
  return p.times_power(n);
}

// 2^x, of more than 127 that of 127.
static inline F32 exp2(F32 x) { return exp2_of_negative(smaller(F32::all(127.0f), x)); }

constexpr float kLog2E = 1.44269504f;

static inline F32 exp(F32 x) { return exp2(x * F32::all(kLog2E)); }

static inline F32 tanh(F32 x) {
  const F32 one = F32::all(1.0f);
  return one - F32::all(2.0f) / (one + exp2(x * F32::all(2.0f * kLog2E)));
}

}  // namespace llmq::LLMQ_ISA
