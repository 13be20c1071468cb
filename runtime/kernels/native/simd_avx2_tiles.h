// What simd_avx2.h has instead where tiles are emulated (LLMQ_TILES): a pair is two bf16 a lane and weights are centered,
// as AVX-512 has them, since that is what tiles take. To be included by it.

constexpr int kPairsOfStep = 4;
constexpr int exact_center(Numbers, int center) { return center; }
LLMQ_INLINE const float* places_of_inputs(Numbers) { return nullptr; }
constexpr int64_t kMostProducts = 0;  // that Products hold: there are none

// Each lane's sum of four products of an unsigned byte and a signed one, by words: two of u = 255 do not fit into one.
LLMQ_INLINE __m256i dot_bytes(__m256i sum, __m256i u, __m256i x) {
  const __m256i even = _mm256_and_si256(u, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(u, 8);
  const __m256i even_x = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd_x = _mm256_srai_epi16(x, 8);
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, even_x), _mm256_madd_epi16(odd, odd_x)));
}
LLMQ_INLINE Ints dot_bytes(Ints sum, Ints u, const int32_t* x) {
  const __m256i spread = _mm256_set1_epi32(*x);
  return {dot_bytes(sum.a, u.a, spread), dot_bytes(sum.b, u.b, spread)};
}

struct Pair {
  Floats even, odd;
};
using InputPair = uint32_t;
constexpr int64_t kPairBytes = 64;

LLMQ_INLINE __m256i halves(__m256 even, __m256 odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd), 0xaa);
}
LLMQ_INLINE void store_pair(uint8_t* p, Pair v) {
  store_line(p, {halves(v.even.a, v.odd.a), halves(v.even.b, v.odd.b)});
}

// kBits bits at kShift of each lane, less half of their range.
template <int kShift, int kBits>
LLMQ_INLINE __m256 centered(__m256i v) {
  const __m256i u = _mm256_and_si256(_mm256_srli_epi32(v, kShift), _mm256_set1_epi32((1 << kBits) - 1));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(u, _mm256_set1_epi32(1 << (kBits - 1))));
}
template <int kShift, int kBits>
LLMQ_INLINE Floats centered(Ints v) {
  return {centered<kShift, kBits>(v.a), centered<kShift, kBits>(v.b)};
}
template <int kBits>
LLMQ_INLINE void expand_centered_nibbles(Ints v, Pair out[4]) {
  out[0] = {centered<0, kBits>(v), centered<16, kBits>(v)};
  out[1] = {centered<8, kBits>(v), centered<24, kBits>(v)};
  out[2] = {centered<4, kBits>(v), centered<20, kBits>(v)};
  out[3] = {centered<12, kBits>(v), centered<28, kBits>(v)};
}
LLMQ_INLINE void expand_int4(const uint8_t* p, Pair out[4]) { expand_centered_nibbles<4>(load_line(p), out); }
LLMQ_INLINE void expand_int3(const uint8_t* p, Pair out[4]) { expand_centered_nibbles<3>(load_int3_line(p), out); }
LLMQ_INLINE void expand_int8_line(const uint8_t* p, Pair out[2]) {
  const Ints v = load_line(p);
  out[0] = {centered<0, 8>(v), centered<16, 8>(v)};
  out[1] = {centered<8, 8>(v), centered<24, 8>(v)};
}
LLMQ_INLINE void expand_e4m3_line(const uint8_t* p, Pair out[2]) {
  const Ints v = load_line(p);
  out[0] = {e4m3_byte<0>(v), e4m3_byte<16>(v)};
  out[1] = {e4m3_byte<8>(v), e4m3_byte<24>(v)};
}
LLMQ_INLINE void expand_bf16_line(const uint8_t* p, Pair out[1]) {
  const Ints v = load_line(p);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  out[0] = {{_mm256_castsi256_ps(_mm256_slli_epi32(v.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(v.b, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(v.a, upper)), _mm256_castsi256_ps(_mm256_and_si256(v.b, upper))}};
}
