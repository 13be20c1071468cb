// Products by tiles, where linear_kernel.cpp is compiled for them (LLMQ_TILES). To be included in its unnamed namespace.
//
// A tile of sums is up to 16 rows by a block of outputs. Lines of unpacked weights are the rows of a tile as they lie:
// an item, 4 bytes, of each output of a block. Four tiles of sums are worked on at once, so that a product's latency (52
// cycles for 16 of throughput) is hidden: 2 tiles of rows by 2 blocks, or 4 blocks where all rows fit one tile.
//
// Emulated in tests; not measured on hardware.
//
// Integer sums are exact: up to kFewRows rows stay with vectors, which unpack in registers. A sum of bf16 products
// depends on their order, and TDPBF16PS has one of its own; so any number of rows goes by tiles. Few rows should stay
// bound by memory all the same: 256 bytes of int4 are a tile of 16 lines, unpacked with 16 permutations and 16 stores,
// loaded in 8 cycles and multiplied in 16, most of it side by side. Some 24 cycles for 256 bytes are 30 GB/s of one core
// at 2.8 GHz; eight channels of DDR5-4800 give each of 56 cores 5.5.

#include "tile_ops.h"

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
// body(Constant<0>()) … body(Constant<N - 1>()): numbers of tiles are part of instructions.
template <int N, class Body>
LLMQ_INLINE void for_each(Body&& body) {
  if constexpr (N > 0) {
    for_each<N - 1>(body);
    body(Constant<N - 1>());
  }
}

template <class Input>
constexpr bool kIsRounded = std::is_same_v<Input, RoundedInput>;

// 8 inputs by one of these steps: the longest that divides all groups, so that no tile reaches beyond one. For most it
// is all a tile holds, 32 inputs in bf16 and 64 in int8.
template <class Input>
int64_t steps_of_tile(const PackedWeight& w) {
  const int64_t steps = w.padded_in() / 8, of_group = w.num_groups() == 1 ? steps : w.group_size / 8;
  int64_t count = kTileRows / Input::kItemsOfStep;
  while (steps % count || of_group % count) count--;
  return count;
}

// Rows in as few tiles as hold them, all of equally many: neighbours share some, which are computed twice, rather than
// that the tiles change their shape.
struct RowTiles {
  int64_t count;
  int rows;  // of each
  int64_t begin(int64_t tile, int64_t num_rows) const { return tile ? (num_rows - rows) * tile / (count - 1) : 0; }
};
RowTiles row_tiles(int64_t num_rows) {
  const int64_t count = (num_rows + kTileRows - 1) / kTileRows;
  return {count, static_cast<int>((num_rows + count - 1) / count)};
}

// Some blocks' weights of a stretch of the input, unpacked: [block][item].
struct TilePanel {
  const uint8_t* weights;
  int64_t block_stride;       // bytes
  int64_t prefetch_distance;  // bytes; 0: nothing is to be fetched
  const GroupScale* scales;   // [group of the stretch][block]
  int64_t first_item, num_items;
  int64_t first_group, num_groups;
  int64_t items_of_group;  // of the stretch's last group there may be fewer
  int64_t depth;           // items of a tile
};

// One or two tiles of rows.
template <int kRowTiles>
struct TileWork {
  int64_t row[kRowTiles];    // the first of each
  float* totals[kRowTiles];  // [row of the tile][block][kLane]
  int rows;                  // of each
};

// sums[tile of rows][block] += inputs x weights, for the items [begin, end) of the panel.
template <int kRowTiles, int kBlocks, class Input>
LLMQ_INLINE void add_products(const TilePanel& panel, const Input& x, const TileWork<kRowTiles>& work, int64_t begin,
                              int64_t end) {
  for (int64_t item = begin; item < end; item += panel.depth) {
    for_each<kRowTiles>([&](auto r) LLMQ_UNROLLED {
      constexpr int kTile = decltype(r)::value;
      tile_load<kInputTiles + kTile>(x.items + work.row[kTile] * x.stride + panel.first_item + item, x.stride * 4);
    });
    for_each<kBlocks>([&](auto b) LLMQ_UNROLLED {
      constexpr int kBlock = decltype(b)::value, kWeights = kWeightTiles + kBlock % 2;
      const uint8_t* lines = panel.weights + kBlock * panel.block_stride + item * 64;
      tile_load<kWeights>(lines, 64);
      if (panel.prefetch_distance) {
        for (int64_t line = 0; line < panel.depth; line++) {
          __builtin_prefetch(lines + line * 64 + panel.prefetch_distance);
        }
      }
      for_each<kRowTiles>([&](auto r) LLMQ_UNROLLED {
        constexpr int kTile = decltype(r)::value, kSums = kTile * kBlocks + kBlock;
        if constexpr (kIsRounded<Input>) {
          tile_dot_bytes<kSums, kInputTiles + kTile, kWeights>();
        } else {
          tile_dot_bf16<kSums, kInputTiles + kTile, kWeights>();
        }
      });
    });
  }
}

// A sum as a tile leaves it, in the input's scale.
template <class Input>
LLMQ_INLINE Floats end_of_tile_sum(const Input& x, int64_t index, const float* p) {
  if constexpr (kIsRounded<Input>) {
    return end_sum(x, index, add_ints(load_sum(p, static_cast<Ints*>(nullptr)), begin_sum(x, index)));
  } else {
    return end_sum(x, index, load_floats(p));
  }
}

// totals += scale * sums, of one group. sums: [tile of rows][row][block][kLane].
template <int kRowTiles, int kBlocks, class Input>
LLMQ_INLINE void add_group(const TilePanel& panel, const Input& x, const TileWork<kRowTiles>& work, int64_t group,
                           int64_t groups, bool is_first, bool corrects, const float* sums) {
  const GroupScale* scales = panel.scales + group * kBlocks;
  for (int r = 0; r < kRowTiles; r++) {
    float* total = work.totals[r];
    for (int row = 0; row < work.rows; row++) {
      const int64_t index = (work.row[r] + row) * groups + panel.first_group + group;
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; b++, total += kLane, sums += kLane) {
        Floats sum = is_first ? zero_floats() : load_floats(total);
        sum = multiply_add(end_of_tile_sum(x, index, sums), scales[b].scale, sum);
        if (corrects) sum = multiply_add(scales[b].correction, broadcast(x.sums[index]), sum);
        store_floats(total, sum);
      }
    }
  }
}

// One or two tiles of rows through a panel. A group that is all of the input leaves its sums as totals from stretch to
// stretch. Others end within one: while a group's products run, the one before is scaled.
template <int kRowTiles, int kBlocks, class Input>
void through_panel(const TilePanel& panel, const Input& x, const TileWork<kRowTiles>& work, int64_t groups,
                   bool corrects) {
  constexpr int64_t kRowBytes = kBlocks * kLane * sizeof(float);
  const bool is_first = panel.first_item == 0;
  if (groups == 1) {
    for_each<kRowTiles * kBlocks>([&](auto tile) LLMQ_UNROLLED {
      constexpr int kTile = decltype(tile)::value;
      if (is_first) return tile_zero<kTile>();
      tile_load<kTile>(work.totals[kTile / kBlocks] + kTile % kBlocks * kLane, kRowBytes);
    });
    add_products<kRowTiles, kBlocks>(panel, x, work, 0, panel.num_items);
    for_each<kRowTiles * kBlocks>([&](auto tile) LLMQ_UNROLLED {
      constexpr int kTile = decltype(tile)::value;
      tile_store<kTile>(work.totals[kTile / kBlocks] + kTile % kBlocks * kLane, kRowBytes);
    });
    return;
  }
  alignas(64) float sums[kRowTiles * kTileRows * kBlocks * kLane];
  for (int64_t group = 0; group < panel.num_groups; group++) {
    for_each<kRowTiles * kBlocks>([&](auto tile) LLMQ_UNROLLED { tile_zero<decltype(tile)::value>(); });
    const int64_t begin = group * panel.items_of_group;
    add_products<kRowTiles, kBlocks>(panel, x, work, begin, min(begin + panel.items_of_group, panel.num_items));
    if (group) {
      add_group<kRowTiles, kBlocks>(panel, x, work, group - 1, groups, is_first && group == 1, corrects, sums);
    }
    for_each<kRowTiles * kBlocks>([&](auto tile) LLMQ_UNROLLED {
      constexpr int kTile = decltype(tile)::value;
      tile_store<kTile>(sums + (kTile / kBlocks * work.rows * kBlocks + kTile % kBlocks) * kLane, kRowBytes);
    });
  }
  add_group<kRowTiles, kBlocks>(panel, x, work, panel.num_groups - 1, groups, is_first && panel.num_groups == 1,
                                corrects, sums);
}

// The rows [first_row, end_row) of kBlocks blocks of outputs, two tiles of rows at once where kRowTiles allows it.
template <Numbers kNumbers, int kRowTiles, int kBlocks, class Input>
void rows_by_tiles(const PackedWeight& w, const Input& x, RowTiles tiles, int64_t first_row, int64_t end_row,
                   int64_t block, const Sink& sink) {
  constexpr int kItems = Input::kItemsOfStep;
  constexpr bool kIsAsPacked = kIsUnpacked<kNumbers, Input>;
  thread_local Scratch panel_memory, scale_memory, total_memory;
  const int64_t groups = w.num_groups(), steps = w.padded_in() / 8, block_bytes = w.block_bytes();
  const int64_t num_rows = end_row - first_row;
  const bool is_one_group = groups == 1, corrects = has_corrections<Input>(w);
  const int64_t of_tile = steps_of_tile<Input>(w), steps_of_group = is_one_group ? of_tile : w.group_size / 8;
  // A panel stays in the first-level cache: 4 blocks by 256 inputs, or 2 by 512, are 32 KB in bf16.
  constexpr int64_t kSteps = 1024 / 8 / (kBlocks < 2 ? 2 : kBlocks);
  const int64_t steps_of_stretch = max(1, kSteps / steps_of_group) * steps_of_group;
  auto* totals = total_memory.get<float>(tiles.count * tiles.rows * kBlocks * kLane);
  auto* scales = scale_memory.get<GroupScale>(is_one_group ? 0 : steps_of_stretch / steps_of_group * kBlocks);
  uint8_t* unpacked = kIsAsPacked ? nullptr : panel_memory.get<uint8_t>(kBlocks * steps_of_stretch * kItems * 64);
  for (int64_t first = 0; first < steps; first += steps_of_stretch) {
    const int64_t count = min(steps_of_stretch, steps - first);
    TilePanel panel{};
    panel.first_item = first * kItems;
    panel.num_items = count * kItems;
    panel.depth = of_tile * kItems;
    panel.items_of_group = steps_of_group * kItems;
    panel.first_group = first / steps_of_group;
    panel.num_groups = (count + steps_of_group - 1) / steps_of_group;
    panel.scales = scales;
    const uint8_t* lines = w.numbers + block * block_bytes + first * line_bytes(kNumbers);
    if (!is_one_group) {
      for (int b = 0; b < kBlocks; b++) {
        for (int64_t group = 0; group < panel.num_groups; group++) prefetch_group(w, block + b, panel.first_group + group);
      }
    }
    if constexpr (kIsAsPacked) {
      panel.weights = lines;
      panel.block_stride = block_bytes;
    } else {
      panel.weights = unpacked;
      panel.block_stride = panel.num_items * 64;
      unpack<kNumbers, kBlocks, Input>(lines, block_bytes, count, unpacked);
    }
    if (!is_one_group) {
      for (int64_t group = 0; group < panel.num_groups; group++) {
        for (int b = 0; b < kBlocks; b++) {
          scales[group * kBlocks + b] = load_group<Input>(w, block + b, panel.first_group + group);
        }
      }
    }
    const auto advance = [&](int64_t tile, auto tiles_at_once) {
      constexpr int kAtOnce = decltype(tiles_at_once)::value;
      TileWork<kAtOnce> work;
      work.rows = tiles.rows;
      for (int r = 0; r < kAtOnce; r++) {
        work.row[r] = first_row + tiles.begin(tile + r, num_rows);
        work.totals[r] = totals + (tile + r) * tiles.rows * kBlocks * kLane;
      }
      panel.prefetch_distance = kIsAsPacked && tile == 0 ? prefetch_distance(kBlocks * block_bytes) : 0;
      through_panel<kAtOnce, kBlocks>(panel, x, work, groups, corrects);
    };
    int64_t tile = 0;
    for (; tile + kRowTiles <= tiles.count; tile += kRowTiles) advance(tile, Constant<kRowTiles>());
    if (kRowTiles > 1 && tile < tiles.count) advance(tile, Constant<1>());
  }
  const bool is_scaled = is_one_group && kNumbers != Numbers::bf16;
  GroupScale scale_of[kBlocks];
  for (int b = 0; b < kBlocks; b++) {
    scale_of[b] = is_scaled ? load_group<Input>(w, block + b, 0) : GroupScale{zero_floats(), zero_floats()};
  }
  // Row by row: the blocks of a row are written side by side.
  for (int64_t tile = 0, row = 0; tile < tiles.count; tile++) {
    for (const int64_t begin = tiles.begin(tile, num_rows); row < begin + tiles.rows; row++) {
      const float* p = totals + (tile * tiles.rows + row - begin) * kBlocks * kLane;
      for (int b = 0; b < kBlocks; b++, p += kLane) {
        Floats total = load_floats(p);
        if (is_scaled) {
          const int64_t index = first_row + row;
          total = multiply_add(end_of_tile_sum(x, index, p), scale_of[b].scale, zero_floats());
          if (corrects) total = multiply_add(scale_of[b].correction, broadcast(x.sums[index]), total);
        }
        sink.put(first_row + row, block + b, total);
      }
    }
  }
}

template <Numbers kNumbers, int kRowTiles, int kBlocks, class Input>
void blocks_by_tiles(const PackedWeight& w, const Input& x, int64_t num_rows, const Sink& sink) {
  const int64_t panels = (w.num_blocks() + kBlocks - 1) / kBlocks, parts = (num_rows + kRowsOfTask - 1) / kRowsOfTask;
  const RowTiles tiles = row_tiles((num_rows + parts - 1) / parts);
  const int64_t depth = steps_of_tile<Input>(w) * Input::kItemsOfStep;
  const auto task_of = [&](int64_t task, int64_t) {
    const int64_t part = task % parts, first_row = num_rows * part / parts, end_row = num_rows * (part + 1) / parts;
    int64_t block = task / parts * kBlocks;
    if (block + kBlocks <= w.num_blocks()) {
      return rows_by_tiles<kNumbers, kRowTiles, kBlocks>(w, x, tiles, first_row, end_row, block, sink);
    }
    for (; block < w.num_blocks(); block++) {
      rows_by_tiles<kNumbers, kRowTiles, 1>(w, x, tiles, first_row, end_row, block, sink);
    }
  };
  thread_pool().parallel_runs(panels * parts, task_of, [&] { return TilesInUse(tiles.rows, depth); });
}

template <Numbers kNumbers, class Input>
void run(const PackedWeight& w, const Input& x, int64_t num_rows, const Sink& sink) {
  if constexpr (kIsRounded<Input>) {
    switch (num_rows) {
      case 1: return few_rows_of<kNumbers, 1>(w, x, 0, sink);
      case 2: return few_rows_of<kNumbers, 2>(w, x, 0, sink);
      case 3: return few_rows_of<kNumbers, 3>(w, x, 0, sink);
      case 4: return few_rows_of<kNumbers, 4>(w, x, 0, sink);
      default: break;
    }
  }
  if (num_rows > kTileRows) return blocks_by_tiles<kNumbers, 2, 2>(w, x, num_rows, sink);
  // Fewer blocks at once where threads would otherwise have none.
  const int64_t blocks_of_thread = w.num_blocks() / thread_pool().num_threads();
  if (blocks_of_thread >= 8) return blocks_by_tiles<kNumbers, 1, 4>(w, x, num_rows, sink);
  if (blocks_of_thread >= 4) return blocks_by_tiles<kNumbers, 1, 2>(w, x, num_rows, sink);
  blocks_by_tiles<kNumbers, 1, 1>(w, x, num_rows, sink);
}
