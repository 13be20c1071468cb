// The vectors of simd_avx512.h, each in two registers of AVX2. To be included inside an unnamed namespace.

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};

constexpr int kExactTileRows = 6, kRoundedTileRows = 6, kTileBlocks = 1;
constexpr int kRoundedGroupedTileRows = 6;
constexpr bool kRoundedHoldsTotals = false, kExactHoldsTotals = false;
constexpr int kExactGroupedTileRows = kExactTileRows, kDirectTileRows = 6, kMostDirectTiles = 4;
constexpr int kFewRowsBlocks[] = {0, 4, 2, 1, 1};

LLMQ_INLINE Floats zero_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LLMQ_INLINE Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LLMQ_INLINE Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LLMQ_INLINE void store_floats(float* p, Floats v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
LLMQ_INLINE Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
LLMQ_INLINE Floats subtract(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
LLMQ_INLINE Floats multiply(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
LLMQ_INLINE Floats divide(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
LLMQ_INLINE Floats multiply_add(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
LLMQ_INLINE Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// Of numbers that are not negative, by their bits: a NaN is above all.
LLMQ_INLINE __m256i maximum_of_bits(__m256 x, __m256 y) {
  return _mm256_max_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y));
}
LLMQ_INLINE Floats maximum_or_nan(Floats x, Floats y) {
  return {_mm256_castsi256_ps(maximum_of_bits(x.a, y.a)), _mm256_castsi256_ps(maximum_of_bits(x.b, y.b))};
}
LLMQ_INLINE float maximum_or_nan_of(Floats x) {
  const __m256i eight = maximum_of_bits(x.a, x.b);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xee));
  const int32_t bits = _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0x55)));
  float most;
  memcpy(&most, &bits, 4);
  return most;
}
LLMQ_INLINE float sum_of(Floats x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

LLMQ_INLINE __m256 eight_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
LLMQ_INLINE Floats load_bf16(const uint16_t* p) { return {eight_bf16(p), eight_bf16(p + 8)}; }
LLMQ_INLINE Floats load_fp16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
LLMQ_INLINE Floats load_uint8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
LLMQ_INLINE Floats load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

// To the nearest, ties to even; a NaN keeps its upper half, and stays one.
LLMQ_INLINE __m128i eight_to_bf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i half = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
LLMQ_INLINE void store_bf16(uint16_t* p, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), eight_to_bf16(v.a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), eight_to_bf16(v.b));
}

LLMQ_INLINE Ints broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
LLMQ_INLINE Ints load_line(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
LLMQ_INLINE void store_line(uint8_t* p, Ints v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), v.b);
}
LLMQ_INLINE Ints add_ints(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
LLMQ_INLINE Floats to_floats(Ints v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
LLMQ_INLINE int32_t sum_of_ints(Ints x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xee));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0x55)));
}

// To the nearest, ties to even, within [-128, 127]: a byte a lane, each four in the order of PackedWeight's.
LLMQ_INLINE Ints round_to_int8(Floats v, int8_t* p) {
  const __m256 low = _mm256_set1_ps(-128), high = _mm256_set1_ps(127);
  const Ints whole = {_mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v.a, low), high)),
                      _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v.b, low), high))};
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole.a, whole.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(bytes, order));
  return whole;
}

// The same numbers as words, in their own order.
LLMQ_INLINE Ints round_to_int8(Floats v, int16_t* p) {
  int8_t bytes[16];
  const Ints whole = round_to_int8(v, bytes);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole.a, whole.b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
  return whole;
}

// The nearest e4m3 number, ties to even, within [-448, 448]; a NaN stays one.
LLMQ_INLINE __m256 round_to_e4m3(__m256 v) {
  const __m256 limited = _mm256_min_ps(_mm256_set1_ps(448), _mm256_max_ps(_mm256_set1_ps(-448), v));
  const __m256i bits = _mm256_castps_si256(limited);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i moved = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7ffff)));
  const __m256 normal = _mm256_castsi256_ps(_mm256_and_si256(moved, _mm256_set1_epi32(static_cast<int>(0xfff00000))));
  // Below 2^-6 the step is 2^-9, the last bit of this.
  const __m256 magic = _mm256_set1_ps(0x1.8p14f);
  const __m256 small = _mm256_sub_ps(_mm256_add_ps(limited, magic), magic);
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), limited);
  const __m256 rounded = _mm256_blendv_ps(normal, small, _mm256_cmp_ps(size, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ));
  return _mm256_blendv_ps(rounded, v, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
LLMQ_INLINE Floats round_to_e4m3(Floats v) { return {round_to_e4m3(v.a), round_to_e4m3(v.b)}; }

// The lower bits of nibbles from `twos`, the third from `ones`.
LLMQ_INLINE __m256i joined(__m256i twos, __m256i ones) {
  return _mm256_or_si256(_mm256_and_si256(twos, _mm256_set1_epi8(0x33)), _mm256_and_si256(ones, _mm256_set1_epi8(0x44)));
}
// The int4 line of 48 bytes of int3.
LLMQ_INLINE Ints load_int3_line(const uint8_t* p) {
  const __m256i twos = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i ones = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 32)));
  const __m256i left = _mm256_setr_epi32(2, 2, 2, 2, 1, 1, 1, 1), right = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  return {joined(twos, _mm256_sllv_epi32(ones, left)),
          joined(_mm256_srli_epi32(twos, 2), _mm256_srlv_epi32(ones, right))};
}

// 8 inputs: the nibbles of a line as bytes, less bits that `mask` lacks: inputs 0 to 3 and 4 to 7.
LLMQ_INLINE void expand_nibbles(Ints v, char mask, Ints out[2]) {
  const __m256i low = _mm256_set1_epi8(mask);
  out[0] = {_mm256_and_si256(v.a, low), _mm256_and_si256(v.b, low)};
  out[1] = {_mm256_and_si256(_mm256_srli_epi16(v.a, 4), low), _mm256_and_si256(_mm256_srli_epi16(v.b, 4), low)};
}

// The e4m3 at `shift` of each lane.
template <int kShift>
LLMQ_INLINE __m256 e4m3_byte(__m256i v) {
  const __m256i u = _mm256_srli_epi32(v, kShift), size = _mm256_and_si256(u, _mm256_set1_epi32(0x7f));
  const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(size, 20), _mm256_set1_epi32((127 - 7) << 23));
  // Those below 2^-6 have no leading one: m * 2^-9.
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(size), _mm256_set1_ps(0x1p-9f));
  const __m256i is_normal = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(7));
  const __m256 bits = _mm256_blendv_ps(small, _mm256_castsi256_ps(normal), _mm256_castsi256_ps(is_normal));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(u, 24), _mm256_set1_epi32(static_cast<int>(0x80000000)));
  return _mm256_or_ps(bits, _mm256_castsi256_ps(sign));
}
template <int kShift>
LLMQ_INLINE Floats e4m3_byte(Ints v) {
  return {e4m3_byte<kShift>(v.a), e4m3_byte<kShift>(v.b)};
}

#ifdef LLMQ_TILES
#include "simd_avx2_tiles.h"
#else

#define LLMQ_SUMS_IN_WORDS  // WordSums, WordLine

// Sums of pairs of products, in int16.
struct WordSums {
  __m256i a, b;
};
// Of u <= 15 and int8, so many times two are at most 8 * 2 * 15 * 128 = 30720.
constexpr int64_t kMostProducts = 8;

LLMQ_INLINE void set_to_zero(WordSums& sum) { sum.a = sum.b = _mm256_setzero_si256(); }
LLMQ_INLINE WordSums dot_bytes(WordSums sum, Ints u, const int32_t* x) {
  const __m256i spread = _mm256_set1_epi32(*x);
  // The intrinsic, but for GCC 12: it adds into another register, copies it back, and has too few of them then.
  asm("vpaddw %1, %0, %0" : "+x"(sum.a) : "x"(_mm256_maddubs_epi16(u.a, spread)));
  asm("vpaddw %1, %0, %0" : "+x"(sum.b) : "x"(_mm256_maddubs_epi16(u.b, spread)));
  return sum;
}
LLMQ_INLINE Ints add_words(Ints sum, WordSums words) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(words.a, ones)),
          _mm256_add_epi32(sum.b, _mm256_madd_epi16(words.b, ones))};
}

// Bytes up to 255 would not do so: they are widened first. Two inputs of each lane.
struct WordLine {
  Ints v;
};
struct InputWords {
  int32_t both;
};
LLMQ_INLINE Ints dot_words(Ints sum, WordLine w, const InputWords* x) {
  const __m256i spread = _mm256_set1_epi32(x->both);
  asm("vpaddd %1, %0, %0" : "+x"(sum.a) : "x"(_mm256_madd_epi16(w.v.a, spread)));
  asm("vpaddd %1, %0, %0" : "+x"(sum.b) : "x"(_mm256_madd_epi16(w.v.b, spread)));
  return sum;
}
LLMQ_INLINE void expand_to_words(const uint8_t* p, WordLine out[2]) {
  const Ints v = load_line(p);
  const __m256i low = _mm256_set1_epi16(0xff);
  out[0] = {{_mm256_and_si256(v.a, low), _mm256_and_si256(v.b, low)}};
  out[1] = {{_mm256_srli_epi16(v.a, 8), _mm256_srli_epi16(v.b, 8)}};
}

// The inputs of a pair one by one: the weights of both would not leave the sums of a tile their registers.
using Pair = Floats;
using InputPair = float;
constexpr int kPairsOfStep = 8;
constexpr int64_t kPairBytes = 64;

LLMQ_INLINE Floats dot_pair(Floats sum, Pair w, const InputPair* x) { return multiply_add(w, broadcast(*x), sum); }
LLMQ_INLINE Pair load_pair(const uint8_t* p) { return load_floats(reinterpret_cast<const float*>(p)); }
LLMQ_INLINE void store_pair(uint8_t* p, Pair v) { store_floats(reinterpret_cast<float*>(p), v); }

// Exact products are with u as it is and where it is: a byte or nibble that begins at bit b of its lane is u * 2^b as a
// float, but for the upmost one, which is moved. 2^-b is what its input is multiplied with before (of two steps). int3
// is taken as the int4 that it would be.
constexpr int exact_center(Numbers numbers, int center) {
  return numbers == Numbers::int3 ? -4 : numbers == Numbers::int4 || numbers == Numbers::int8 ? 0 : center;
}
LLMQ_INLINE const float* places_of_inputs(Numbers numbers) {
  static constexpr float kOfInt4[] = {1, 0x1p-16, 0x1p-8, 0x1p-24, 0x1p-4, 0x1p-20, 0x1p-12, 1,
                                      1, 0x1p-16, 0x1p-8, 0x1p-24, 0x1p-4, 0x1p-20, 0x1p-12, 1};
  static constexpr float kOfInt8[] = {1, 0x1p-16, 0x1p-8, 1, 1, 0x1p-16, 0x1p-8, 1,
                                      1, 0x1p-16, 0x1p-8, 1, 1, 0x1p-16, 0x1p-8, 1};
  return numbers == Numbers::int4 || numbers == Numbers::int3 ? kOfInt4 : numbers == Numbers::int8 ? kOfInt8 : nullptr;
}

// kBits bits at kShift of each lane, as places_of_inputs says.
template <int kShift, int kBits>
LLMQ_INLINE __m256 in_place(__m256i v) {
  if (kShift + kBits == 32) return _mm256_cvtepi32_ps(_mm256_srli_epi32(v, kShift));
  return _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32(((1 << kBits) - 1) << kShift)));
}
template <int kShift, int kBits>
LLMQ_INLINE Floats in_place(Ints v) {
  return {in_place<kShift, kBits>(v.a), in_place<kShift, kBits>(v.b)};
}
// body(input, weights), for each input of a line: one after the other, or the weights of all would be in memory before
// the first is multiplied.
template <class Body>
LLMQ_INLINE void nibbles_in_place(Ints v, const Body& body) {
  body(0, in_place<0, 4>(v));
  body(1, in_place<16, 4>(v));
  body(2, in_place<8, 4>(v));
  body(3, in_place<24, 4>(v));
  body(4, in_place<4, 4>(v));
  body(5, in_place<20, 4>(v));
  body(6, in_place<12, 4>(v));
  body(7, in_place<28, 4>(v));
}
template <class Body>
LLMQ_INLINE void bytes_in_place(Ints v, const Body& body) {
  body(0, in_place<0, 8>(v));
  body(1, in_place<16, 8>(v));
  body(2, in_place<8, 8>(v));
  body(3, in_place<24, 8>(v));
}
// int3 as the int4 that it would be: 4 more.
LLMQ_INLINE Ints int3_as_int4(const uint8_t* p) {
  const Ints v = load_int3_line(p);
  const __m256i fours = _mm256_set1_epi8(0x44);
  return {_mm256_add_epi8(v.a, fours), _mm256_add_epi8(v.b, fours)};
}
// The same, all at once.
LLMQ_INLINE void expand_int4(const uint8_t* p, Pair out[8]) {
  nibbles_in_place(load_line(p), [&](int i, Pair w) LLMQ_UNROLLED { out[i] = w; });
}
LLMQ_INLINE void expand_int3(const uint8_t* p, Pair out[8]) {
  nibbles_in_place(int3_as_int4(p), [&](int i, Pair w) LLMQ_UNROLLED { out[i] = w; });
}
LLMQ_INLINE void expand_int8_line(const uint8_t* p, Pair out[4]) {
  bytes_in_place(load_line(p), [&](int i, Pair w) LLMQ_UNROLLED { out[i] = w; });
}
LLMQ_INLINE void expand_e4m3_line(const uint8_t* p, Pair out[4]) {
  const Ints v = load_line(p);
  out[0] = e4m3_byte<0>(v);
  out[1] = e4m3_byte<16>(v);
  out[2] = e4m3_byte<8>(v);
  out[3] = e4m3_byte<24>(v);
}
LLMQ_INLINE void expand_bf16_line(const uint8_t* p, Pair out[2]) {
  const Ints v = load_line(p);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  out[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(v.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(v.b, 16))};
  out[1] = {_mm256_castsi256_ps(_mm256_and_si256(v.a, upper)), _mm256_castsi256_ps(_mm256_and_si256(v.b, upper))};
}

#endif
