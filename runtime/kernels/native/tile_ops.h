// The eight tile registers of AMX, each of up to 16 rows of 64 bytes, and the same in plain C++ where the compiler has no
// leave to use them (tile_ops_emulated.h). To be included inside an unnamed namespace, behind vectors.

constexpr int kTileRegisters = 8, kTileRows = 16;

// What ldtilecfg reads: palette 1 (Intel SDM volume 1, 18.3).
struct alignas(64) TileConfig {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#ifdef __AMX_TILE__

// The instructions themselves: the intrinsics of GCC are macros that take no number from a template, and do not say that
// they read memory, the configuration (gcc.gnu.org/PR114098, before 12.4) as little as a tile.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
LLMQ_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
LLMQ_INLINE void tile_load(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(rows), "r"(stride_bytes) : "memory");
}
template <int kTile>
LLMQ_INLINE void tile_store(void* rows, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(rows), "r"(stride_bytes) : "memory");
}
// sums += a b: pairs of bf16, summed in fp32 in the order that tile_ops_emulated.h shows.
template <int kSums, int kA, int kB>
LLMQ_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}
// Likewise signed bytes by unsigned ones, exactly.
template <int kSums, int kA, int kB>
LLMQ_INLINE void tile_dot_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

#else
#include "tile_ops_emulated.h"
#endif

// Which tile is what: sums of a tile of rows by a block of outputs, then inputs, then weights.
constexpr int kInputTiles = 4, kWeightTiles = 6;

// Tiles of one shape for as long as it lives. A thread that is done gives its tiles back: otherwise each switch to
// another thread saves and restores their 8 KB.
class TilesInUse {
 public:
  // For products of `rows` rows by 16 outputs, of `depth` items of 4 bytes.
  TilesInUse(int rows, int64_t depth) {
    TileConfig config;
    config.palette = 1;
    for (int tile = 0; tile < kTileRegisters; tile++) {
      const bool is_input = kInputTiles <= tile && tile < kWeightTiles;
      config.rows[tile] = static_cast<uint8_t>(tile < kWeightTiles ? rows : depth);
      config.row_bytes[tile] = static_cast<uint16_t>(is_input ? depth * 4 : 64);
    }
    configure_tiles(config);
  }
  ~TilesInUse() { release_tiles(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};
