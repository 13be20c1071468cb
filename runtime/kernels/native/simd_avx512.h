// Vectors of kLane floats or of a line of 64 bytes, by AVX-512. With __AVX512BF16__ a pair of inputs is two bf16 in a
// lane, else two vectors of floats. To be included inside an unnamed namespace.

using Floats = __m512;
using Ints = __m512i;

// Rows and blocks of a tile: as many sums as 32 registers hold beside the weights, and beside what scales them where
// they are integers.
constexpr int kExactTileRows = 12, kRoundedTileRows = 12, kTileBlocks = 2;
constexpr int kRoundedGroupedTileRows = 6;
constexpr bool kRoundedHoldsTotals = true, kExactHoldsTotals = true;
#ifdef __AVX512BF16__
constexpr int kExactGroupedTileRows = 7, kDirectTileRows = 12, kMostDirectTiles = 2;
#else
constexpr int kExactGroupedTileRows = 6, kDirectTileRows = 8, kMostDirectTiles = 2;
#endif
constexpr int kPairsOfStep = 4;
// What exact products multiply is centered, and in its place.
constexpr int exact_center(Numbers, int center) { return center; }
LLMQ_INLINE const float* places_of_inputs(Numbers) { return nullptr; }
constexpr int64_t kMostProducts = 0;  // that Products hold: there are none
// Blocks that few rows go through at once, by rows: enough independent sums to hide a product's latency.
constexpr int kFewRowsBlocks[] = {0, 6, 3, 2, 2};

LLMQ_INLINE Floats zero_floats() { return _mm512_setzero_ps(); }
LLMQ_INLINE Floats broadcast(float x) { return _mm512_set1_ps(x); }
LLMQ_INLINE Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
LLMQ_INLINE void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
LLMQ_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
LLMQ_INLINE Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
LLMQ_INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
LLMQ_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
LLMQ_INLINE Floats absolute(Floats a) { return _mm512_abs_ps(a); }
// Of numbers that are not negative, by their bits: a NaN is above all.
LLMQ_INLINE Floats maximum_or_nan(Floats a, Floats b) {
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
LLMQ_INLINE float maximum_or_nan_of(Floats a) {
  const int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(a));
  float most;
  memcpy(&most, &bits, 4);
  return most;
}
LLMQ_INLINE float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }

LLMQ_INLINE Floats load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
LLMQ_INLINE Floats load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LLMQ_INLINE Floats load_uint8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
LLMQ_INLINE Floats load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

LLMQ_INLINE void store_bf16(uint16_t* p, Floats v) {
#ifdef __AVX512BF16__
  const __m256i half = (__m256i)_mm512_cvtneps_pbh(v);
#else
  // To the nearest, ties to even; a NaN keeps its upper half, and stays one.
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

LLMQ_INLINE Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
LLMQ_INLINE Ints load_line(const uint8_t* p) { return _mm512_loadu_si512(p); }
LLMQ_INLINE void store_line(uint8_t* p, Ints v) { _mm512_storeu_si512(p, v); }
LLMQ_INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
LLMQ_INLINE Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
LLMQ_INLINE int32_t sum_of_ints(Ints a) { return _mm512_reduce_add_epi32(a); }

// To the nearest, ties to even, within [-128, 127]: a byte a lane, each four in the order of PackedWeight's.
LLMQ_INLINE Ints round_to_int8(Floats v, int8_t* p) {
  const __m512 limited = _mm512_min_ps(_mm512_max_ps(v, _mm512_set1_ps(-128)), _mm512_set1_ps(127));
  const __m512i whole = _mm512_cvtps_epi32(limited);
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(whole), order));
  return whole;
}
LLMQ_INLINE Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }

// The nearest e4m3 number, ties to even, within [-448, 448]; a NaN stays one.
LLMQ_INLINE Floats round_to_e4m3(Floats v) {
  const __m512 limited = _mm512_min_ps(_mm512_set1_ps(448), _mm512_max_ps(_mm512_set1_ps(-448), v));
  const __m512i bits = _mm512_castps_si512(limited);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  const __m512i moved = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7ffff)));
  const __m512 normal = _mm512_castsi512_ps(_mm512_and_si512(moved, _mm512_set1_epi32(static_cast<int>(0xfff00000))));
  // Below 2^-6 the step is 2^-9, the last bit of this.
  const __m512 magic = _mm512_set1_ps(0x1.8p14f);
  const __m512 small = _mm512_sub_ps(_mm512_add_ps(limited, magic), magic);
  const __mmask16 is_small = _mm512_cmp_ps_mask(_mm512_abs_ps(limited), _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_mask_mov_ps(normal, is_small, small), is_nan, v);
}

// Each lane's sum of four products of an unsigned byte and a signed one.
LLMQ_INLINE Ints dot_bytes(Ints sum, Ints u, const int32_t* x) {
  // The intrinsic, but for GCC 12: where sums fill most registers it copies each to another one and back, every time.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(_mm512_set1_epi32(*x)));
  return sum;
}

// The int4 line of 48 bytes of int3; the highest bit of a nibble is any.
LLMQ_INLINE Ints load_int3_line(const uint8_t* p) {
  const Ints twos = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const Ints ones = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 32)));
  const Ints to_bit_0 = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
  const Ints to_bit_2 = _mm512_setr_epi32(2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 31, 31, 31, 31);
  return _mm512_ternarylogic_epi32(_mm512_srlv_epi32(twos, to_bit_0), _mm512_rolv_epi32(ones, to_bit_2),
                                   _mm512_set1_epi8(0x33), 0xe4);  // c ? a : b
}

// 8 inputs: the nibbles of a line as bytes, less bits that `mask` lacks: inputs 0 to 3 and 4 to 7.
LLMQ_INLINE void expand_nibbles(Ints v, char mask, Ints out[2]) {
  const Ints low = _mm512_set1_epi8(mask);
  out[0] = _mm512_and_si512(v, low);
  out[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
}

// The byte at `shift` of each lane, less 128.
template <int kShift>
LLMQ_INLINE Floats centered_byte(Ints v) {
  const Ints magic = _mm512_set1_epi32(0x4b000000);  // 2^23: the lowest bits of the mantissa count ones
  const Ints u = kShift ? _mm512_srli_epi32(v, kShift) : v;
  const Ints bits = _mm512_ternarylogic_epi32(u, _mm512_set1_epi32(0xff), magic, 0xea);  // (u & 0xff) | magic
  return _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p23f + 128));
}

#ifdef __AVX512BF16__

struct Pair {
  __m512i v;
};
using InputPair = uint32_t;
constexpr int64_t kPairBytes = 64;

LLMQ_INLINE Floats dot_pair(Floats sum, Pair w, const InputPair* x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(*x));
}
LLMQ_INLINE Pair load_pair(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
LLMQ_INLINE void store_pair(uint8_t* p, Pair v) { _mm512_store_si512(p, v.v); }

// bf16 of -8 to 7, twice.
alignas(64) constexpr uint16_t kNibbles[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// Of -4 to 3, four times: a nibble's highest bit is not asked.
alignas(64) constexpr uint16_t kOctets[32] = {
    0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0xc080, 0xc040, 0xc000,
    0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80,
    0x4000, 0x4040, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040};

LLMQ_INLINE void expand_nibbles(Ints v, Ints table, Pair out[4]) {
  out[0] = {_mm512_permutexvar_epi16(v, table)};
  out[1] = {_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table)};
  out[2] = {_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table)};
  out[3] = {_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table)};
}
LLMQ_INLINE void expand_int4(const uint8_t* p, Pair out[4]) {
  expand_nibbles(load_line(p), _mm512_load_si512(kNibbles), out);
}
LLMQ_INLINE void expand_int3(const uint8_t* p, Pair out[4]) {
  expand_nibbles(load_int3_line(p), _mm512_load_si512(kOctets), out);
}

// A whole number below 256 is exact in the upper half of its float.
LLMQ_INLINE Pair pair_of(Floats even, Floats odd) {
  const Ints low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(odd))};
}
LLMQ_INLINE void expand_int8_line(const uint8_t* p, Pair out[2]) {
  const Ints v = load_line(p);
  out[0] = pair_of(centered_byte<0>(v), centered_byte<16>(v));
  out[1] = pair_of(centered_byte<8>(v), centered_byte<24>(v));
}
LLMQ_INLINE void expand_bf16_line(const uint8_t* p, Pair out[1]) { out[0] = load_pair(p); }

// bf16 of the e4m3 numbers below 2^-6, which have no leading one: m * 2^-9.
alignas(64) constexpr uint16_t kSmall[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

// e4m3 in the lower bytes of words, whatever the upper ones hold; their signs are in bit 15 of `signs`.
LLMQ_INLINE Pair pair_of_e4m3(Ints v, Ints signs) {
  const Ints shifted = _mm512_slli_epi16(_mm512_and_si512(v, _mm512_set1_epi16(0x7f)), 4);
  const Ints normal = _mm512_add_epi16(shifted, _mm512_set1_epi16((127 - 7) << 7));
  const __mmask32 is_small = _mm512_testn_epi16_mask(v, _mm512_set1_epi16(0x78));
  const Ints size = _mm512_mask_permutexvar_epi16(normal, is_small, v, _mm512_load_si512(kSmall));
  return {_mm512_ternarylogic_epi32(size, signs, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xf8)};  // a | (b & c)
}
LLMQ_INLINE void expand_e4m3_line(const uint8_t* p, Pair out[2]) {
  const Ints v = load_line(p);
  out[0] = pair_of_e4m3(v, _mm512_slli_epi16(v, 8));
  out[1] = pair_of_e4m3(_mm512_srli_epi16(v, 8), v);
}

#else

struct Pair {
  Floats even, odd;
};
struct InputPair {
  float even, odd;
};
constexpr int64_t kPairBytes = 128;

LLMQ_INLINE Floats dot_pair(Floats sum, Pair w, const InputPair* x) {
  return multiply_add(w.odd, broadcast(x->odd), multiply_add(w.even, broadcast(x->even), sum));
}
LLMQ_INLINE Pair load_pair(const uint8_t* p) { return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 64)}; }
LLMQ_INLINE void store_pair(uint8_t* p, Pair v) {
  _mm512_store_ps(p, v.even);
  _mm512_store_ps(p + 64, v.odd);
}

template <int kShift>
LLMQ_INLINE Floats of_nibble(Ints v, Floats table) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(v, kShift), table);
}
LLMQ_INLINE void expand_nibbles(Ints v, Floats table, Pair out[4]) {
  out[0] = {of_nibble<0>(v, table), of_nibble<16>(v, table)};
  out[1] = {of_nibble<8>(v, table), of_nibble<24>(v, table)};
  out[2] = {of_nibble<4>(v, table), of_nibble<20>(v, table)};
  out[3] = {of_nibble<12>(v, table), of_nibble<28>(v, table)};
}
LLMQ_INLINE void expand_int4(const uint8_t* p, Pair out[4]) {
  expand_nibbles(load_line(p), _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8), out);
}
LLMQ_INLINE void expand_int3(const uint8_t* p, Pair out[4]) {
  expand_nibbles(load_int3_line(p), _mm512_set_ps(3, 2, 1, 0, -1, -2, -3, -4, 3, 2, 1, 0, -1, -2, -3, -4), out);
}
LLMQ_INLINE void expand_int8_line(const uint8_t* p, Pair out[2]) {
  const Ints v = load_line(p);
  out[0] = {centered_byte<0>(v), centered_byte<16>(v)};
  out[1] = {centered_byte<8>(v), centered_byte<24>(v)};
}
// The e4m3 at `shift` of each lane.
template <int kShift>
LLMQ_INLINE Floats e4m3_byte(Ints v) {
  const Ints u = kShift ? _mm512_srli_epi32(v, kShift) : v;
  const Ints size = _mm512_and_si512(u, _mm512_set1_epi32(0x7f));
  const Ints normal = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32((127 - 7) << 23));
  // Those below 2^-6 have no leading one: m * 2^-9.
  const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(size), _mm512_set1_ps(0x1p-9f));
  const __mmask16 is_small = _mm512_testn_epi32_mask(u, _mm512_set1_epi32(0x78));
  const Ints bits = _mm512_mask_mov_epi32(normal, is_small, _mm512_castps_si512(small));
  const Ints sign = _mm512_set1_epi32(static_cast<int>(0x80000000));
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, _mm512_slli_epi32(u, 24), sign, 0xf8));  // a | (b & c)
}
LLMQ_INLINE void expand_e4m3_line(const uint8_t* p, Pair out[2]) {
  const Ints v = load_line(p);
  out[0] = {e4m3_byte<0>(v), e4m3_byte<16>(v)};
  out[1] = {e4m3_byte<8>(v), e4m3_byte<24>(v)};
}
LLMQ_INLINE void expand_bf16_line(const uint8_t* p, Pair out[1]) {
  const Ints v = load_line(p);
  const Ints odd = _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  out[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), _mm512_castsi512_ps(odd)};
}

#endif
