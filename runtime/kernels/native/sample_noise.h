// The noise of runtime/sampling/noise.py. Included into namespaces of their own: see f32.h.

// The output function of SplitMix64 (Steele, Lea, Flood 2014).
static inline uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

// Uniform in (0, 1).
static inline double uniform(uint64_t key, int64_t index) {
  const uint64_t bits = mix(key + static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15ull);
  return (static_cast<double>(static_cast<int64_t>(bits >> 11)) + 0.5) * 0x1p-53;
}
