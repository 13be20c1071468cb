// Numbers of K and V, from their blocks into the units that an inner product consumes.
#pragma once

#include "attention.h"
#include "f32.h"
#include "inline.h"

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

// Loads bfloat16 that lie `stride` numbers apart.
class StridedLoad {
 public:
  explicit StridedLoad(int stride) : stride_(stride) {
#if defined(__AVX512F__)
    at_once_ = least(16, 64 / stride);
    mask_ = words_of(at_once_);
    const __m512i lanes = _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 0,
                                                                0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    index_ = _mm512_mullo_epi16(lanes, _mm512_set1_epi16(static_cast<short>(stride)));
#else
    memset(order_, -1, sizeof(order_));
    for (int i = 0; i < 8 && stride <= kMostStride; i++) {
      const int vector = least(i * stride / 8, stride - 1), at = i * stride - first_of(vector);
      order_[vector][2 * i] = static_cast<int8_t>(2 * at);
      order_[vector][2 * i + 1] = static_cast<int8_t>(2 * at + 1);
    }
#endif
  }
  LLMQ_INLINE void operator()(const bf16* from, int count, float* to) const {
#if defined(__AVX512F__)
    if (at_once_ > 1) {
      for (; count >= at_once_; from += at_once_ * stride_, to += at_once_, count -= at_once_) load(from, mask_, at_once_, to);
      if (count > 0) load(from, words_of(count), count, to);
      return;
    }
#else
    for (; count >= 8 && stride_ <= kMostStride; from += 8 * stride_, to += 8, count -= 8) load_eight(from, to);
#endif
    for (int i = 0; i < count; i++) to[i] = to_float(from[i * stride_]);
  }

 private:
  int stride_;
#if defined(__AVX512F__)
  uint64_t words_of(int count) const { return ~uint64_t{0} >> (63 - (count - 1) * stride_); }
  LLMQ_INLINE void load(const bf16* from, uint64_t words, int count, float* to) const {
    const __m512i low = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(words), from);
    const __m512i high = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(words >> 32), from + 32);
    F32::widened(_mm512_castsi512_si256(_mm512_permutex2var_epi16(low, index_, high))).store(to, count);
  }

  int at_once_;
  uint64_t mask_;
  __m512i index_;
#else
  static constexpr int kMostStride = 8;
  // Of the vector-th eight words; the last ones end with the last number.
  int first_of(int vector) const { return least(8 * vector, 7 * stride_ - 7); }
  LLMQ_INLINE void load_eight(const bf16* from, float* to) const {
    __m128i words = _mm_setzero_si128();
    for (int vector = 0; vector < stride_; vector++) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + first_of(vector)));
      words = _mm_or_si128(words, _mm_shuffle_epi8(eight, _mm_load_si128(reinterpret_cast<const __m128i*>(order_[vector]))));
    }
    F32::widened(words).store(to);
  }

  alignas(16) int8_t order_[kMostStride][16];  // where a number's bytes are in the vector-th eight; -1: not there
#endif
};

// A unit is what one lane multiplies at a time: a float, two bfloat16 or four bytes, whose products a lane adds. Of a plane
// in tiles a vector of units of as many keys is read at once, where kTileHoldsUnits as it is multiplied, else by
// spread_keys.
struct FloatUnits {
  using Unit = float;
  using Vector = F32;
  using Sum = F32;
  static constexpr int kDepth = 1;  // numbers in a unit
  static constexpr int kTerms = 1;  // of which queries and weights are sums
  static constexpr int kColumnsOfValues = F32::kWidth;  // numbers of V's heads are padded to a multiple of them
  static constexpr bool kTakesQueries = false;  // as they lie in the caller's memory
  static constexpr bool kSumsExactly = false;   // in any order
  static constexpr bool kReadsPlainKeys = true;  // those that are not in tiles
  static constexpr bool takes(KVFormat) { return true; }
  static bool suits(int) { return true; }  // a head of so many numbers
  template <KVFormat kFormat> static constexpr bool kTileHoldsUnits = kFormat == KVFormat::fp32;
  template <KVFormat kFormat> static constexpr bool kSpreads = kFormat == KVFormat::bf16;

  struct Scores {
    static F32 add(F32 sum, F32 a, F32 b) { return fma(a, b, sum); }
  };
  using Mixture = Scores;
  static F32 next_term(F32 sum) { return sum; }
  static F32 total(const F32 (&terms)[kTerms]) { return terms[0]; }
  static F32 all(const float* a) { return F32::all(*a); }
  static F32 load(const float* b) { return F32::load(b); }
  static F32 load_keys(const float* b) { return F32::load(b); }
  static F32 score(F32 sum, int32_t) { return sum; }
  static F32 mixed(F32 sum, float) { return sum; }
  static F32 load_mixed(const float* mixed, int d) { return F32::load(mixed + d); }

  template <class T>
  static void prepare_query(const T* query, int head_dim, float* to, int64_t, float&, int32_t&) {
    for (int d = 0; d < head_dim; d += F32::kWidth) {
      const int n = least(F32::kWidth, head_dim - d);
      F32::load(query + d, n).store(to + d, n);
    }
  }
  // Weights of keys [first, end), of which one is the largest, and what their products are to be multiplied by.
  static float store_weights(const float* weights, float, int first, int end, float* to) {
    for (int key = first; key < end; key += F32::kWidth) F32::load(weights + key).store(to + key);
    return 1.0f;
  }
  // W keys of a tile, from `column` on: each unit's, kKeyTile apart.
  template <KVFormat kFormat>
  static void spread_keys(const uint32_t* column, int head_dim, float* to) {
    for (int u = 0; u < head_dim / 2; u++, column += kTileTokens, to += 2 * kKeyTile) {
      const F32 pairs = F32::load(reinterpret_cast<const float*>(column));
      pairs.lower_bf16().store(to);
      pairs.upper_bf16().store(to + kKeyTile);
    }
  }
  // Units [first, first + count) of a head that lies by itself; 0 beyond them.
  template <KVFormat kFormat>
  static F32 load_key(const uint8_t* head, int head_dim, int first, int count) {
    return load_stored<kFormat>(head, head_dim, first, count);
  }
  // A unit for each number of a head from the d-th on, of kDepth keys; anything beyond head_dim.
  template <KVFormat kFormat, int C>
  LLMQ_INLINE static void join_values(const uint8_t* const* heads, int head_dim, int d, Vector (&joined)[C]) {
    for (int c = 0; c < C; c++, d += F32::kWidth) {
      joined[c] = load_stored<kFormat>(heads[0], head_dim, d, least(F32::kWidth, head_dim - d));
    }
  }
  static void store(Vector vector, float* to) { vector.store(to); }
};

#if defined(__AVX512F__)

// Four bytes. K and V stay the integers that are stored; queries and weights, each row with a scale of its own, become
// integers: of 16 bits, the sum of two terms, 256 · high + low, which add next to nothing to the stored numbers' own
// rounding; or of 8 bits, for half the products. Sums are exact, so that a row's result depends on no order.
template <int kTermsOfNumbers>
struct ByteUnits {
  using Unit = uint32_t;
  struct Vector {
    __m512i v;
  };
  struct Sum {
    __m512i v;
  };
  static constexpr int kDepth = 4;
  static constexpr int kTerms = kTermsOfNumbers;
  static constexpr int kColumnsOfValues = 64;
  static constexpr bool kTakesQueries = false;
  static constexpr bool kSumsExactly = true;
  static constexpr bool kReadsPlainKeys = true;
  static constexpr bool takes(KVFormat format) { return format == KVFormat::int8 || format == KVFormat::int4; }
  static bool suits(int) { return true; }
  template <KVFormat kFormat> static constexpr bool kTileHoldsUnits = kFormat == KVFormat::int8;
  template <KVFormat kFormat> static constexpr bool kSpreads = kFormat == KVFormat::int4;

  // VNNI multiplies unsigned by signed bytes: 128 is added to keys, which `score` takes away again, and weights have no
  // sign. A sum of kMostHeadDim products of 8 and 16 bits, or of a span's keys, stays below 2^31.
  struct Scores {
    static Sum add(Sum sum, Vector a, Vector b) { return dot(sum, b, a); }
  };
  struct Mixture {
    static Sum add(Sum sum, Vector a, Vector b) { return dot(sum, a, b); }
  };
  static Sum next_term(Sum sum) { return {_mm512_slli_epi32(sum.v, 8)}; }
  static Sum total(const Sum (&terms)[kTerms]) {
    if constexpr (kTerms == 1) return terms[0];
    return {_mm512_add_epi32(next_term(terms[0]).v, terms[kTerms - 1].v)};
  }
  static Vector all(const uint32_t* a) { return {_mm512_set1_epi32(static_cast<int>(*a))}; }
  static Vector load(const uint32_t* b) { return {_mm512_loadu_si512(b)}; }
  static Vector load_keys(const uint32_t* b) { return {_mm512_xor_si512(load(b).v, _mm512_set1_epi8(-128))}; }
  static F32 score(Sum sum, int32_t offset) {
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(sum.v, _mm512_set1_epi32(offset)))};
  }
  static F32 mixed(Sum sum, float factor) { return F32{_mm512_cvtepi32_ps(sum.v)} * F32::all(factor); }
  // join_values leaves the j-th four of each 16 numbers in the j-th vector of 64.
  static F32 load_mixed(const float* mixed, int d) {
    const float* from = mixed + d / 64 * 64 + d % 64 / 4;
    __m512 result = _mm512_castps128_ps512(_mm_loadu_ps(from));
    result = _mm512_insertf32x4(result, _mm_loadu_ps(from + 16), 1);
    result = _mm512_insertf32x4(result, _mm_loadu_ps(from + 32), 2);
    return {_mm512_insertf32x4(result, _mm_loadu_ps(from + 48), 3)};
  }

  template <class T>
  static void prepare_query(const T* query, int head_dim, uint32_t* to, int64_t stride, float& scale, int32_t& offset) {
    const int units = (head_dim + 3) / 4;
    F32 top = F32::all(1e-30f);
    for (int d = 0; d < head_dim; d += 16) {
      const F32 numbers = F32::load(query + d, least(16, head_dim - d)).magnitude();
      // A NaN has the largest bits.
      top.v = _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(numbers.v), _mm512_castps_si512(top.v)));
    }
    const float most_of_all = to_float_of(_mm512_reduce_max_epi32(_mm512_castps_si512(top.v)));
    constexpr float kMost = kTerms == 1 ? 127.0f : 127.0f * 256.0f + 127.0f;
    scale *= most_of_all / kMost;
    const F32 inverse = F32::all(kMost / most_of_all);
    __m512i sum = _mm512_setzero_si512();
    int8_t* high = reinterpret_cast<int8_t*>(to);
    int8_t* low = reinterpret_cast<int8_t*>(to + (kTerms - 1) * stride);
    for (int d = 0; d < 4 * units; d += 16) {
      const int n = least(16, 4 * units - d), given = least(16, head_dim - d);
      // No number becomes 0, of which a sum stays within its 32 bits: the scale is NaN, or infinite, by itself.
      const F32 scaled = F32::load(query + d, given) * inverse;
      const __mmask16 are_numbers = _mm512_cmp_ps_mask(scaled.v, scaled.v, _CMP_ORD_Q);
      const __m512i whole = _mm512_maskz_cvtps_epi32(are_numbers, scaled.v);
      sum = _mm512_add_epi32(sum, whole);
      if constexpr (kTerms == 2) {
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        _mm_mask_storeu_epi8(high + d, F32::mask(n), _mm512_cvtepi32_epi8(upper));
      }
      _mm_mask_storeu_epi8(low + d, F32::mask(n), _mm512_cvtepi32_epi8(whole));
    }
    offset = 128 * _mm512_reduce_add_epi32(sum);
  }

  // Of 8 bits not to the nearest: beside one large weight hundreds of small ones may all be below a half, and theirs is a
  // good part of the sum. So what is added before the fraction is cut off differs from key to key, evenly between 0 and 1.
  static float store_weights(const float* weights, float largest, int first, int end, uint32_t* to) {
    constexpr float kMost = kTerms == 1 ? 255.0f : 65535.0f;
    const __m512 inverse = _mm512_set1_ps(kMost / largest);
    // Packing takes four of each of the four vectors in turn.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int key = first; key < end; key += 64) {
      __m512i whole[4], words[2];
      for (int i = 0; i < 4; i++) {
        const __m512 weight = _mm512_loadu_ps(weights + key + 16 * i);
        if constexpr (kTerms == 1) {
          whole[i] = _mm512_cvttps_epi32(_mm512_fmadd_ps(weight, inverse, _mm512_load_ps(kDither)));
        } else {
          whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(weight, inverse));
        }
      }
      for (int i = 0; i < 2; i++) words[i] = _mm512_packus_epi32(whole[2 * i], whole[2 * i + 1]);
      if constexpr (kTerms == 1) {
        const __m512i bytes = _mm512_packus_epi16(words[0], words[1]);
        _mm512_storeu_si512(to + key / 4, _mm512_permutexvar_epi32(order, bytes));
      } else {
        const __m512i mask = _mm512_set1_epi16(0xff);
        const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(words[0], 8), _mm512_srli_epi16(words[1], 8));
        const __m512i low = _mm512_packus_epi16(_mm512_and_si512(words[0], mask), _mm512_and_si512(words[1], mask));
        _mm512_storeu_si512(to + key / 4, _mm512_permutexvar_epi32(order, high));
        _mm512_storeu_si512(to + (kKeySpan + key) / 4, _mm512_permutexvar_epi32(order, low));
      }
    }
    return largest / kMost;
  }

  template <KVFormat kFormat>
  static void spread_keys(const uint32_t* column, int head_dim, uint32_t* to) {
    const __m512i nibble = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(8);
    const int half = head_dim / 8;  // units
    for (int u = 0; u < half; u++, column += kTileTokens, to += kKeyTile) {
      const __m512i codes = load(column).v, high = _mm512_srli_epi16(codes, 4);
      _mm512_storeu_si512(to, _mm512_sub_epi8(_mm512_and_si512(codes, nibble), zero));
      _mm512_storeu_si512(to + half * kKeyTile, _mm512_sub_epi8(_mm512_and_si512(high, nibble), zero));
    }
  }
  template <KVFormat kFormat>
  LLMQ_INLINE static F32 load_key(const uint8_t* head, int head_dim, int first, int) {
    return {_mm512_castsi512_ps(load_bytes<kFormat>(head, head_dim, 4 * first))};
  }
  // Of the four vectors of 64 numbers, all or two.
  template <KVFormat kFormat, int C>
  LLMQ_INLINE static void join_values(const uint8_t* const* heads, int head_dim, int d, Vector (&joined)[C]) {
    static_assert(C == 2 || C == 4);
    __m512i keys[4];
    for (int i = 0; i < 4; i++) keys[i] = load_bytes<kFormat>(heads[i], head_dim, d / 64 * 64);
    for (int half = 0; half < C / 2; half++) {
      const bool is_high = d % 64 != 0 || half == 1;
      const __m512i pair01 = is_high ? _mm512_unpackhi_epi8(keys[0], keys[1]) : _mm512_unpacklo_epi8(keys[0], keys[1]);
      const __m512i pair23 = is_high ? _mm512_unpackhi_epi8(keys[2], keys[3]) : _mm512_unpacklo_epi8(keys[2], keys[3]);
      joined[2 * half] = {_mm512_unpacklo_epi16(pair01, pair23)};
      joined[2 * half + 1] = {_mm512_unpackhi_epi16(pair01, pair23)};
    }
  }
  static void store(Vector vector, uint32_t* to) { _mm512_storeu_si512(to, vector.v); }

 private:
  // (2 i + 1) / 32, each i once, neighbours far apart.
  alignas(64) static constexpr float kDither[16] = {1 / 32.0f,  17 / 32.0f, 9 / 32.0f,  25 / 32.0f, 5 / 32.0f,  21 / 32.0f,
                                                    13 / 32.0f, 29 / 32.0f, 3 / 32.0f,  19 / 32.0f, 11 / 32.0f, 27 / 32.0f,
                                                    7 / 32.0f,  23 / 32.0f, 15 / 32.0f, 31 / 32.0f};

  static Sum dot(Sum sum, Vector u, Vector s) {
    // The intrinsic, but for GCC 12: see simd_avx512.h.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(u.v), "v"(s.v));
    return sum;
  }
  static float to_float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  // The first n of a vector's, which may be more or fewer than it has. Without a branch, so that a loop has it made before.
  static __mmask64 bytes_mask(int n) { return n <= 0 ? 0 : ~uint64_t{0} >> (64 - least(n, 64)); }
  // Numbers [d, d + 64) of a head as signed bytes; beyond head_dim anything.
  template <KVFormat kFormat>
  LLMQ_INLINE static __m512i load_bytes(const uint8_t* head, int head_dim, int d) {
    // With a mask always, which is the same for all keys: a branch for each of them costs more.
    if constexpr (kFormat == KVFormat::int8) {
      return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - least(head_dim - d, 64)), head + d);
    }
    if constexpr (kFormat == KVFormat::int4) {
      // The first half of a head in the low nibbles; a vector may lie on both sides of the middle.
      const int half = head_dim / 2;
      const __mmask64 below = bytes_mask(half - d);
      const __m512i nibble = _mm512_set1_epi8(15);
      const __m512i low = _mm512_maskz_loadu_epi8(below, head + d);
      const __m512i high = _mm512_maskz_loadu_epi8(bytes_mask(head_dim - d) & ~below, head + d - half);
      const __m512i codes = _mm512_or_si512(_mm512_and_si512(low, nibble),
                                            _mm512_and_si512(_mm512_srli_epi16(high, 4), nibble));
      return _mm512_sub_epi8(codes, _mm512_set1_epi8(8));
    }
  }
};

#else

// Two words of 16 bits. K and V stay the integers that are stored; queries and weights, each row with a scale of its own,
// become integers of 16 bits. Sums are exact, as ByteUnits' are. Of four numbers of a key the first and the third make a
// unit, and the others the next one: a tile's bytes become words with three instructions.
struct WordUnits {
  using Unit = uint32_t;
  struct Vector {
    __m256i v;
  };
  struct Sum {
    __m256i v;
  };
  static constexpr int kDepth = 2;
  static constexpr int kTerms = 1;
  static constexpr int kColumnsOfValues = 16;
  static constexpr bool kTakesQueries = false;
  static constexpr bool kSumsExactly = true;
  static constexpr bool kReadsPlainKeys = false;
  static constexpr bool takes(KVFormat format) { return format == KVFormat::int8 || format == KVFormat::int4; }
  static bool suits(int head_dim) { return head_dim % 32 == 0; }  // whole vectors, of int4 in both halves
  template <KVFormat> static constexpr bool kTileHoldsUnits = false;
  template <KVFormat> static constexpr bool kSpreads = true;

  struct Scores {
    static Sum add(Sum sum, Vector a, Vector b) {
      // The intrinsic, but for GCC 12: it adds products up first, in an order that leaves no register free.
      asm("vpaddd %1, %0, %0" : "+x"(sum.v) : "x"(_mm256_madd_epi16(a.v, b.v)));
      return sum;
    }
  };
  using Mixture = Scores;
  static Sum next_term(Sum sum) { return sum; }
  static Sum total(const Sum (&terms)[kTerms]) { return terms[0]; }
  static Vector all(const uint32_t* a) { return {_mm256_set1_epi32(static_cast<int>(*a))}; }
  static Vector load(const uint32_t* b) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b))}; }
  static Vector load_keys(const uint32_t* b) { return load(b); }
  static F32 score(Sum sum, int32_t) { return {_mm256_cvtepi32_ps(sum.v)}; }
  static F32 mixed(Sum sum, float factor) { return F32{_mm256_cvtepi32_ps(sum.v)} * F32::all(factor); }
  // join_values leaves the first and the third four of 16 numbers in one vector, the others in the next.
  static F32 load_mixed(const float* mixed, int d) {
    const float* from = mixed + d / 16 * 16 + d % 16 / 2;
    return {_mm256_set_m128(_mm_loadu_ps(from + 8), _mm_loadu_ps(from))};
  }

  // A sum of kMostHeadDim products stays below 2^31.
  template <class T>
  static void prepare_query(const T* query, int head_dim, uint32_t* to, int64_t, float& scale, int32_t&) {
    constexpr float kMost = 32639.0f;
    __m256i top = _mm256_castps_si256(_mm256_set1_ps(1e-30f));
    for (int d = 0; d < head_dim; d += 8) {
      // A NaN has the largest bits.
      top = _mm256_max_epi32(top, _mm256_castps_si256(F32::load(query + d).magnitude().v));
    }
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    half = _mm_max_epi32(half, _mm_unpackhi_epi64(half, half));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 1));
    const float most_of_all = _mm_cvtss_f32(_mm_castsi128_ps(half));
    scale *= most_of_all / kMost;
    const F32 inverse = F32::all(kMost / most_of_all);
    for (int d = 0; d < head_dim; d += 8) {
      // No number becomes 0, of which a sum stays within its 32 bits: the scale is NaN, or infinite, by itself.
      const F32 scaled = F32::load(query + d) * inverse;
      const __m256i whole = _mm256_and_si256(_mm256_cvtps_epi32(scaled.v),
                                             _mm256_castps_si256(_mm256_cmp_ps(scaled.v, scaled.v, _CMP_ORD_Q)));
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
      const __m128i in_units = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d / 2), _mm_shuffle_epi8(words, in_units));
    }
  }

  static float store_weights(const float* weights, float largest, int first, int end, uint32_t* to) {
    constexpr float kMost = 32767.0f;
    const F32 inverse = F32::all(kMost / largest);
    for (int key = first; key < end; key += 16) {
      const __m256i low = _mm256_cvtps_epi32((F32::load(weights + key) * inverse).v);
      const __m256i high = _mm256_cvtps_epi32((F32::load(weights + key + 8) * inverse).v);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + key / 2),
                          _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
    }
    return largest / kMost;
  }

  template <KVFormat kFormat>
  static void spread_keys(const uint32_t* column, int head_dim, uint32_t* to) {
    const auto put = [](uint32_t* at, __m256i words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), words); };
    if constexpr (kFormat == KVFormat::int8) {
      for (int u = 0; u < head_dim / 4; u++, column += kTileTokens, to += 2 * kKeyTile) {
        const __m256i bytes = load(column).v;
        put(to, _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8));
        put(to + kKeyTile, _mm256_srai_epi16(bytes, 8));
      }
    }
    if constexpr (kFormat == KVFormat::int4) {
      const __m256i nibble = _mm256_set1_epi16(15), zero = _mm256_set1_epi16(8);
      const int half = head_dim / 4;  // units
      for (int u = 0; u < head_dim / 8; u++, column += kTileTokens, to += 2 * kKeyTile) {
        const __m256i codes = load(column).v;
        const auto numbers = [&](__m256i v) { return _mm256_sub_epi16(_mm256_and_si256(v, nibble), zero); };
        put(to, numbers(codes));
        put(to + kKeyTile, numbers(_mm256_srli_epi16(codes, 8)));
        put(to + half * kKeyTile, numbers(_mm256_srli_epi16(codes, 4)));
        put(to + (half + 1) * kKeyTile, numbers(_mm256_srli_epi16(codes, 12)));
      }
    }
  }
  // Not of heads that lie by themselves: see `reads`.
  template <KVFormat kFormat>
  LLMQ_INLINE static F32 load_key(const uint8_t*, int, int, int) {
    return F32::zero();
  }
  template <KVFormat kFormat, int C>
  LLMQ_INLINE static void join_values(const uint8_t* const* heads, int head_dim, int d, Vector (&joined)[C]) {
    static_assert(C % 2 == 0);
    unrolled<C / 2>([&](int i) LLMQ_UNROLLED {
      const __m256i a = load_words<kFormat>(heads[0], head_dim, d + 16 * i);
      const __m256i b = load_words<kFormat>(heads[1], head_dim, d + 16 * i);
      joined[2 * i] = {_mm256_unpacklo_epi16(a, b)};
      joined[2 * i + 1] = {_mm256_unpackhi_epi16(a, b)};
    });
  }
  static void store(Vector vector, uint32_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), vector.v); }

 private:
  // Numbers [d, d + 16) of a head.
  template <KVFormat kFormat>
  LLMQ_INLINE static __m256i load_words(const uint8_t* head, int head_dim, int d) {
    const auto bytes = [](const uint8_t* from) LLMQ_UNROLLED {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    };
    if constexpr (kFormat == KVFormat::int8) return _mm256_cvtepi8_epi16(bytes(head + d));
    if constexpr (kFormat == KVFormat::int4) {
      // The first half of a head in the low nibbles.
      const int half = head_dim / 2;
      const __m256i codes = _mm256_cvtepu8_epi16(bytes(head + (d < half ? d : d - half)));
      const __m256i nibbles = d < half ? _mm256_and_si256(codes, _mm256_set1_epi16(15)) : _mm256_srli_epi16(codes, 4);
      return _mm256_sub_epi16(nibbles, _mm256_set1_epi16(8));
    }
  }
};

#endif

#if defined(__AVX512BF16__)

// bfloat16 of e4m3's magnitudes: one of the two bytes of each. The product of bfloat16 takes subnormals as 0; as
// bfloat16 e4m3's own are none.
struct MagnitudeBytes {
  alignas(64) uint8_t bytes[128];
  constexpr explicit MagnitudeBytes(int shift) : bytes() {
    for (int code = 0; code < 128; code++) {
      const int exponent = code >> 3, mantissa = code & 7;
      int bits = (exponent + 120) << 7 | mantissa << 4;
      if (code == 0x7f) bits = 0x7fc0;
      if (exponent == 0) {  // mantissa · 2^-9
        const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        bits = mantissa == 0 ? 0 : (118 + top) << 7 | (mantissa << (7 - top) & 0x7f);
      }
      bytes[code] = static_cast<uint8_t>(bits >> shift);
    }
  }
  __m512i operator[](__m512i codes) const {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), codes, _mm512_load_si512(bytes + 64));
  }
};
constexpr MagnitudeBytes kLowOfMagnitude{0}, kHighOfMagnitude{8};

struct PairUnits {
  using Unit = uint32_t;
  using Vector = F32;
  using Sum = F32;
  static constexpr int kDepth = 2;
  static constexpr int kTerms = 1;
  static constexpr int kColumnsOfValues = 2 * F32::kWidth;
  static constexpr bool kTakesQueries = true;
  static constexpr bool kSumsExactly = false;
  static constexpr bool kReadsPlainKeys = true;
  static constexpr bool takes(KVFormat format) { return format == KVFormat::bf16 || format == KVFormat::fp8; }
  static bool suits(int head_dim) { return head_dim % 2 == 0; }
  template <KVFormat kFormat> static constexpr bool kTileHoldsUnits = kFormat == KVFormat::bf16;
  template <KVFormat kFormat> static constexpr bool kSpreads = kFormat == KVFormat::fp8;

  struct Scores {
    static F32 add(F32 sum, F32 a, F32 b) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)}; }
  };
  using Mixture = Scores;
  static F32 next_term(F32 sum) { return sum; }
  static F32 total(const F32 (&terms)[kTerms]) { return terms[0]; }
  static F32 all(const uint32_t* a) { return {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*a)))}; }
  static F32 load(const uint32_t* b) { return {_mm512_castsi512_ps(_mm512_loadu_si512(b))}; }
  static F32 load_keys(const uint32_t* b) { return load(b); }
  static F32 score(F32 sum, int32_t) { return sum; }
  static F32 mixed(F32 sum, float) { return sum; }
  static F32 load_mixed(const float* mixed, int d) { return F32::load(mixed + d); }
  static float store_weights(const float* weights, float, int first, int end, uint32_t* to) {
    for (int key = first; key < end; key += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + key / 2),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + key)));
    }
    return 1.0f;
  }

  template <KVFormat kFormat>
  static void spread_keys(const uint32_t* column, int head_dim, uint32_t* to) {
    for (int u = 0; u < head_dim / 4; u++, column += kTileTokens, to += 2 * kKeyTile) {
      const __m512i codes = _mm512_loadu_si512(column), low = kLowOfMagnitude[codes], high = high_bytes(codes);
      // Four bf16 of two keys in each 128 bits, and of the other two.
      const __m512 some = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
      const __m512 others = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
      _mm512_storeu_ps(to, _mm512_shuffle_ps(some, others, 0x88));
      _mm512_storeu_ps(to + kKeyTile, _mm512_shuffle_ps(some, others, 0xdd));
    }
  }
  template <KVFormat kFormat>
  LLMQ_INLINE static F32 load_key(const uint8_t* head, int, int first, int count) {
    if constexpr (kFormat == KVFormat::bf16) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(head) + first;
      return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi32(F32::mask(count), from))};
    }
    if constexpr (kFormat == KVFormat::fp8) {
      const uint8_t* from = head + 2 * first;
      const auto mask = static_cast<__mmask32>((uint64_t{1} << 2 * count) - 1);
      const __m256i codes = _mm256_maskz_loadu_epi8(mask, from);
      return {_mm512_castsi512_ps(float8_to_bf16(codes))};
    }
  }
  template <KVFormat kFormat, int C>
  LLMQ_INLINE static void join_values(const uint8_t* const* heads, int head_dim, int d, Vector (&joined)[C]) {
    static_assert(C % 2 == 0);
    const __m512i low = _mm512_add_epi32(lanes(), _mm512_slli_epi32(_mm512_add_epi32(lanes(), _mm512_set1_epi32(32)), 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int c = 0; c < C; c += 2, d += 32) {
      const int count = least(16, (head_dim - d) / 2);
      const __m512i a = _mm512_castps_si512(load_key<kFormat>(heads[0], head_dim, d / 2, count).v);
      const __m512i b = _mm512_castps_si512(load_key<kFormat>(heads[1], head_dim, d / 2, count).v);
      joined[c] = {_mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b))};
      joined[c + 1] = {_mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b))};
    }
  }
  static void store(Vector vector, uint32_t* to) { _mm512_storeu_si512(to, _mm512_castps_si512(vector.v)); }

 private:
  static __m512i float8_to_bf16(__m256i e4m3) {
    // Eight of them in each lane, for unpacking. A look-up does not see the sign.
    const __m512i spread = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
    const __m512i codes = _mm512_permutexvar_epi64(spread, _mm512_castsi256_si512(e4m3));
    return _mm512_unpacklo_epi8(kLowOfMagnitude[codes], high_bytes(codes));
  }
  static __m512i high_bytes(__m512i codes) {
    return _mm512_ternarylogic_epi32(kHighOfMagnitude[codes], codes, _mm512_set1_epi8(-128), 0xf8);  // a | b & c
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
