// Compiled once for each instruction set.

#include "row_kernels.h"

#include "kernels.h"
#include "f32.h"

namespace llmq::LLMQ_ISA {
namespace {

constexpr int W = F32::kWidth;

// f(vector, index, count) over a row, the last vector with what is left.
template <class F>
inline void for_vectors(int64_t size, F&& f) {
  int64_t i = 0;
  for (; i + W <= size; i += W) f(i, W);
  if (i < size) f(i, static_cast<int>(size - i));
}

struct Moments {
  float mean;       // 0 for rms
  float factor;     // 1 / sqrt(variance + eps)
};

template <class T>
Moments moments(const Norm& norm, const T* x) {
  F32 sum = F32::zero(), squares = F32::zero();
  float mean = 0;
  if (norm.kind == Norm::Kind::layer) {
    for_vectors(norm.size, [&](int64_t i, int n) { sum = sum + F32::load(x + i, n); });
    mean = sum.sum() / static_cast<float>(norm.size);
  }
  const F32 center = F32::all(mean);
  for_vectors(norm.size, [&](int64_t i, int n) {
    F32 value = F32::load(x + i, n);
    if (norm.kind == Norm::Kind::layer) value = value - center;
    if (n < W && norm.kind == Norm::Kind::layer) {
      // What fills the vector up is not of the row.
      float lanes[W];
      value.store(lanes);
      value = F32::load(lanes, n);
    }
    squares = fma(value, value, squares);
  });
  const float variance = squares.sum() / static_cast<float>(norm.size);
  return {mean, 1.0f / __builtin_sqrtf(variance + norm.eps)};
}

inline F32 normalized(const Norm& norm, const Moments& of, F32 x, int64_t i, int n) {
  if (norm.kind == Norm::Kind::layer) {
    const F32 centered = (x - F32::all(of.mean)) * F32::all(of.factor);
    return fma(centered, F32::load(norm.weight + i, n), F32::load(norm.bias + i, n));
  }
  return x * F32::all(of.factor) * F32::load(norm.weight + i, n);
}

template <class T, class U>
void normalize(const Norm& norm, const T* x, U* out) {
  const Moments of = moments(norm, x);
  for_vectors(norm.size, [&](int64_t i, int n) { normalized(norm, of, F32::load(x + i, n), i, n).store(out + i, n); });
}

// erf by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7.
inline F32 erf(F32 x) {
  const F32 one = F32::all(1.0f), a = x.magnitude();
  const F32 t = one / fma(F32::all(0.3275911f), a, one);
  F32 p = F32::all(1.061405429f);
  p = fma(p, t, F32::all(-1.453152027f));
  p = fma(p, t, F32::all(1.421413741f));
  p = fma(p, t, F32::all(-0.284496736f));
  p = fma(p, t, F32::all(0.254829592f));
  const F32 result = one - p * t * exp(F32::zero() - a * a);
  return where_below(x, F32::zero(), F32::zero() - result, result);
}

template <ActivationFunction kFunction>
inline F32 activated(F32 x) {
  const F32 one = F32::all(1.0f), half = F32::all(0.5f);
  if constexpr (kFunction == ActivationFunction::silu) return x / (one + exp(F32::zero() - x));
  if constexpr (kFunction == ActivationFunction::gelu) return half * x * (one + erf(x * F32::all(0.70710678f)));
  if constexpr (kFunction == ActivationFunction::gelu_tanh) {
    const F32 inner = F32::all(0.79788456f) * fma(F32::all(0.044715f) * x * x, x, x);
    return half * x * (one + tanh(inner));
  }
  // A NaN stays one.
  return where_below(x, F32::zero(), F32::zero(), x);
}

template <ActivationFunction kFunction>
void activate_rows(const ActivateCall& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const bf16* in = call.in[row];
    bf16* out = call.out[row];
    for_vectors(call.size, [&](int64_t i, int n) {
      F32 made = activated<kFunction>(F32::load(in + i, n));
      if (call.gated) made = made.rounded_to_bf16() * F32::load(in + call.size + i, n);
      made.store(out + i, n);
    });
  }
}

// x of a head -> as the store keeps it (runtime/kv_codec.py).
class HeadWriter {
 public:
  HeadWriter(const KVPlane& plane, int64_t block, int64_t offset, int head)
      : plane_(plane), to_(plane.order == KVOrder::by_unit ? plain_ : plane.head(block, offset, head)),
        units_(plane.order == KVOrder::by_unit ? plane.head(block, offset, head) : nullptr),
        scale_(plane.scales ? plane.scale(block, offset, head) : nullptr) {}

  template <class T>
  void write(const T* x) {
    write_plain(x);
    if (units_ == nullptr) return;
    const int64_t bytes = plane_.head_bytes();
    for (int64_t at = 0; at < bytes; at += kTileUnit) memcpy(units_ + at * kTileTokens, plain_ + at, kTileUnit);
  }

 private:
  template <class T>
  void write_plain(const T* x) const {
    switch (plane_.format) {
      case KVFormat::fp32:
        return each(x, [&](F32 v, int64_t i, int n) { v.store(reinterpret_cast<float*>(to_) + i, n); });
      case KVFormat::fp16:
        return each(x, [&](F32 v, int64_t i, int n) { v.store_half(reinterpret_cast<uint16_t*>(to_) + i, n); });
      case KVFormat::bf16:
        return each(x, [&](F32 v, int64_t i, int n) { v.store(reinterpret_cast<bf16*>(to_) + i, n); });
      case KVFormat::int8: {
        const F32 scale = F32::all(scale_for<127>(x));
        return each(x, [&](F32 v, int64_t i, int n) { store_integers<127>(v / scale, to_ + i, n); });
      }
      case KVFormat::fp8: {
        const F32 scale = F32::all(scale_for<448>(x));
        return each(x, [&](F32 v, int64_t i, int n) { store_float8(v / scale, to_ + i, n); });
      }
      case KVFormat::int4: return write_int4(x);
    }
  }

  template <class T, class F>
  void each(const T* x, F&& f) const {
    for_vectors(plane_.head_dim, [&](int64_t i, int n) { f(F32::load(x + i, n), i, n); });
  }

  // The layer's scale, or max|x| / limit, kept and used in bfloat16: of a head with a NaN it is one.
  template <int kLimit, class T>
  float scale_for(const T* x) const {
    if (scale_ == nullptr) return plane_.static_scale;
    F32 top = F32::zero();
    bool has_nan = false;
    each(x, [&](F32 v, int64_t, int) {
      top = larger(v.magnitude(), top);
      has_nan |= v.any_nan();
    });
    *scale_ = has_nan ? 0x7fc0 : to_bf16(most(top.largest() / kLimit, 1e-30f));
    return to_float(*scale_);
  }

  template <int kLimit>
  static void store_integers(F32 quotient, uint8_t* to, int n) {
    const F32 limit = F32::all(kLimit);
    const F32 q = smaller(limit, larger(F32::all(-kLimit - 1), quotient.whole()));
    float lanes[W];
    q.store(lanes);
    for (int i = 0; i < n; i++) to[i] = static_cast<uint8_t>(static_cast<int8_t>(lanes[i]));
  }

  static void store_float8(F32 quotient, uint8_t* to, int n) {
    const F32 limit = F32::all(448.0f);
    float lanes[W];
    smaller(limit, larger(F32::zero() - limit, quotient)).store(lanes);
    for (int i = 0; i < n; i++) to[i] = float8(lanes[i]);
  }

  // float32 within ±448 -> e4m3, to the nearest, ties to even.
  static uint8_t float8(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint8_t>(sign | 0x7f);
    if (magnitude < 0x3c800000) {  // 2^-6: below it steps are 2^-9
      float absolute;
      memcpy(&absolute, &magnitude, 4);
      return static_cast<uint8_t>(sign | static_cast<uint32_t>(__builtin_rintf(absolute * 512.0f)));
    }
    const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
  }

  template <class T>
  void write_int4(const T* x) const {
    uint8_t numbers[kMostHeadDim];
    const F32 scale = F32::all(scale_for<7>(x));
    each(x, [&](F32 v, int64_t i, int n) { store_integers<7>(v / scale, numbers + i, n); });
    const int half = plane_.head_dim / 2;
    for (int i = 0; i < half; i++) {
      to_[i] = static_cast<uint8_t>((numbers[i] + 8) & 15) | static_cast<uint8_t>((numbers[half + i] + 8) << 4);
    }
  }

  const KVPlane& plane_;
  alignas(64) uint8_t plain_[4 * kMostHeadDim];
  uint8_t* to_;     // a head as it is, number by number
  uint8_t* units_;  // where it goes if that is unit by unit
  uint16_t* scale_;
};

// Rotate a head in place: the pairs (x[i], x[i + half]); what lies behind 2 · half stays.
inline void rotate(bf16* x, const float* cos, const float* sin, int64_t half) {
  for_vectors(half, [&](int64_t i, int n) {
    const F32 first = F32::load(x + i, n), second = F32::load(x + half + i, n);
    const F32 c = F32::load(cos + i, n), s = F32::load(sin + i, n);
    (first * c - second * s).store(x + i, n);
    (second * c + first * s).store(x + half + i, n);
  });
}

void normalize_heads(const Norm& norm, bf16* x, int64_t size) {
  if (norm.kind == Norm::Kind::none) return;
  for (int64_t at = 0; at < size; at += norm.size) normalize(norm, x + at, x + at);
}

void embed(const EmbedCall& call, int64_t begin, int64_t end) {
  const F32 scale = F32::all(call.scale);
  for (int64_t row = begin; row < end; row++) {
    const bf16* from = call.embedding + call.token_ids[row] * call.size;
    bf16* to = call.out[row];
    for_vectors(call.size, [&](int64_t i, int n) { (F32::load(from + i, n) * scale).store(to + i, n); });
  }
}

void residual(const ResidualCall& call, int64_t begin, int64_t end) {
  const F32 scale = F32::all(call.scale);
  for (int64_t row = begin; row < end; row++) {
    bf16* x = call.x[row];
    if (call.y.data != nullptr) {
      bf16* y = call.y[row];
      if (call.after.kind != Norm::Kind::none) normalize(call.after, y, y);
      for_vectors(call.size, [&](int64_t i, int n) {
        F32 added = F32::load(y + i, n);
        if (call.scale != 1.0f) added = (added * scale).rounded_to_bf16();
        (F32::load(x + i, n) + added).store(x + i, n);
      });
    }
    if (call.before.kind != Norm::Kind::none) normalize(call.before, x, call.out[row]);
  }
}

void activate(const ActivateCall& call, int64_t begin, int64_t end) {
  switch (call.function) {
    case ActivationFunction::silu: return activate_rows<ActivationFunction::silu>(call, begin, end);
    case ActivationFunction::gelu: return activate_rows<ActivationFunction::gelu>(call, begin, end);
    case ActivationFunction::gelu_tanh: return activate_rows<ActivationFunction::gelu_tanh>(call, begin, end);
    case ActivationFunction::relu: return activate_rows<ActivationFunction::relu>(call, begin, end);
  }
}

void combine(const CombineCall& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const int64_t* place = call.place + row * call.choices;
    const float* weights = call.weights + row * call.choices;
    bf16* out = call.out[row];
    for_vectors(call.size, [&](int64_t i, int n) {
      F32 sum = F32::zero();
      for (int k = 0; k < call.choices; k++) sum = sum + F32::load(call.x[place[k]] + i, n) * F32::all(weights[k]);
      sum.store(out + i, n);
    });
  }
}

void prepare_qkv(const QkvCall& call, int64_t begin, int64_t end) {
  const int64_t size_q = int64_t{call.num_heads} * call.head_dim_k, size_k = int64_t{call.num_kv_heads} * call.head_dim_k;
  for (int64_t row = begin; row < end; row++) {
    bf16* q = call.qkv[row];
    bf16* k = q + size_q;
    const bf16* v = k + size_k;
    normalize_heads(call.q_norm, q, size_q);
    normalize_heads(call.k_norm, k, size_k);
    if (call.cos != nullptr) {
      const int64_t at = call.positions[row] * call.half;
      for (int head = 0; head < call.num_heads + call.num_kv_heads; head++) {
        rotate(q + int64_t{head} * call.head_dim_k, call.cos + at, call.sin + at, call.half);
      }
    }
    for (int head = 0; head < call.num_kv_heads; head++) {
      HeadWriter(call.keys, call.slot_block[row], call.slot_offset[row], head).write(k + head * call.head_dim_k);
      HeadWriter(call.values, call.slot_block[row], call.slot_offset[row], head).write(v + head * call.head_dim_v);
    }
  }
}

void write_kv(const KVPlane& plane, const void* x, bool is_float32, int64_t stride, const int64_t* slot_block,
              const int64_t* slot_offset, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    for (int head = 0; head < plane.num_kv_heads; head++) {
      HeadWriter writer(plane, slot_block[row], slot_offset[row], head);
      const int64_t at = row * stride + int64_t{head} * plane.head_dim;
      is_float32 ? writer.write(static_cast<const float*>(x) + at) : writer.write(static_cast<const bf16*>(x) + at);
    }
  }
}

}  // namespace

extern const ModelKernels model_kernels;
const ModelKernels model_kernels = {embed, residual, activate, combine, prepare_qkv, write_kv, attend};

}  // namespace llmq::LLMQ_ISA
