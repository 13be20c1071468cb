// The tile operations of tile_ops.h in C++, bit for bit as the pseudo code of Intel's SDM (volume 2) has them. What
// hardware answers with an exception ends the program.

struct Tile {
  alignas(64) uint8_t rows[kTileRows][64];
};
struct TileState {
  TileConfig config;  // palette 0: none
  Tile tiles[kTileRegisters];
};

inline TileState& tile_state() {
  thread_local TileState state;
  return state;
}

inline void require(bool condition) {
  if (!condition) __builtin_trap();
}

inline void configure_tiles(const TileConfig& config) {
  require(config.palette == 1 && config.start_row == 0);
  for (int tile = 0; tile < 16; tile++) {
    const bool is_used = tile < kTileRegisters && config.rows[tile];
    require(is_used ? config.rows[tile] <= kTileRows && 0 < config.row_bytes[tile] && config.row_bytes[tile] <= 64
                    : !config.rows[tile] && !config.row_bytes[tile]);
  }
  memset(tile_state().tiles, 0, sizeof(TileState::tiles));
  tile_state().config = config;
}
inline void release_tiles() { tile_state().config = {}; }

inline Tile& used_tile(TileState& state, int tile) {
  require(state.config.palette == 1 && state.config.rows[tile]);
  return state.tiles[tile];
}

template <int kTile>
void tile_zero() {
  memset(&used_tile(tile_state(), kTile), 0, sizeof(Tile));
}
template <int kTile>
void tile_load(const void* rows, int64_t stride_bytes) {
  TileState& state = tile_state();
  tile_zero<kTile>();
  for (int row = 0; row < state.config.rows[kTile]; row++) {
    const uint8_t* from = static_cast<const uint8_t*>(rows) + row * stride_bytes;
    memcpy(state.tiles[kTile].rows[row], from, state.config.row_bytes[kTile]);
  }
}
template <int kTile>
void tile_store(void* rows, int64_t stride_bytes) {
  TileState& state = tile_state();
  const Tile& tile = used_tile(state, kTile);
  for (int row = 0; row < state.config.rows[kTile]; row++) {
    memcpy(static_cast<uint8_t*>(rows) + row * stride_bytes, tile.rows[row], state.config.row_bytes[kTile]);
  }
}

template <int kSums, int kA, int kB>
TileState& state_of_product() {
  static_assert(kSums != kA && kSums != kB && kA != kB);
  TileState& state = tile_state();
  for (int tile : {kSums, kA, kB}) used_tile(state, tile);
  const TileConfig& config = state.config;
  require(config.rows[kSums] == config.rows[kA] && config.row_bytes[kA] == 4 * config.rows[kB]);
  require(config.row_bytes[kSums] == 64 && config.row_bytes[kB] == 64);  // as all are here: 16 outputs
  return state;
}

// Denormals are zeros, before an operation and behind it, and rounding is to the nearest, whatever the thread wants.
// The barriers keep what is read from memory after the one and written before the other between them.
class TileRounding {
 public:
  TileRounding() {
    constexpr uint32_t kMode = 0x9fc0;  // flush to zero, denormals are zeros, no exceptions
    asm volatile("stmxcsr %0" : "=m"(before_));
    asm volatile("ldmxcsr %0" : : "m"(kMode) : "memory");
  }
  ~TileRounding() { asm volatile("ldmxcsr %0" : : "m"(before_) : "memory"); }

 private:
  uint32_t before_;
};

// TDPBF16PS: the even and the odd inputs are two sums, each by fused multiply-adds from zero; their sum is added.
template <int kSums, int kA, int kB>
void tile_dot_bf16() {
  TileState& state = state_of_product<kSums, kA, kB>();
  const TileRounding rounding;
  for (int row = 0; row < state.config.rows[kSums]; row++) {
    Floats even = zero_floats(), odd = zero_floats();
    for (int k = 0; k < state.config.rows[kB]; k++) {
      uint16_t halves[2];
      memcpy(halves, state.tiles[kA].rows[row] + 4 * k, 4);
      const uint32_t bits[2] = {uint32_t{halves[0]} << 16, uint32_t{halves[1]} << 16};
      float x[2];
      memcpy(x, bits, 8);
      Pair weights;
      expand_bf16_line(state.tiles[kB].rows[k], &weights);
      even = multiply_add(broadcast(x[0]), weights.even, even);
      odd = multiply_add(broadcast(x[1]), weights.odd, odd);
    }
    auto* sums = reinterpret_cast<float*>(state.tiles[kSums].rows[row]);
    store_floats(sums, add(load_floats(sums), add(even, odd)));
  }
}

// TDPBSUD.
template <int kSums, int kA, int kB>
void tile_dot_bytes() {
  TileState& state = state_of_product<kSums, kA, kB>();
  for (int row = 0; row < state.config.rows[kSums]; row++) {
    uint32_t sums[16];
    memcpy(sums, state.tiles[kSums].rows[row], 64);
    for (int k = 0; k < state.config.rows[kB]; k++) {
      int8_t x[4];
      memcpy(x, state.tiles[kA].rows[row] + 4 * k, 4);
      for (int lane = 0; lane < 16; lane++) {
        const uint8_t* u = state.tiles[kB].rows[k] + 4 * lane;
        const int32_t sum = x[0] * u[0] + x[1] * u[1] + x[2] * u[2] + x[3] * u[3];
        sums[lane] += static_cast<uint32_t>(sum);
      }
    }
    memcpy(state.tiles[kSums].rows[row], sums, 64);
  }
}
