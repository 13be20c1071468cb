// One task of paged attention; compiled once for each instruction set.

#include "attention.h"
#include "inline.h"
#include "kernels.h"
#include "kv_units.h"

namespace llmq::LLMQ_ISA {
namespace {

constexpr int W = F32::kWidth;
constexpr int kRowBlock = 6;  // rows whose sums stay in registers
constexpr int kDirectRows = 16;  // of a KV head, for which K and V are not copied: decode, and some guesses
constexpr int kColumns = W == 16 ? 4 : 2;  // vectors of a row that do

// Below every score, and finite: a difference of two of them is a number.
constexpr float kNoMaximum = -1e30f;
constexpr float kMasked = -2e30f;

// In place of a head that is not to be read.
alignas(64) constexpr uint8_t kNothing[4 * kMostHeadDim] = {};

// sums[r][c] += a[r][u] · row[c]
template <class Units, class Product, int R, int C>
LLMQ_INLINE void add_unit(const typename Units::Unit* const* a, int64_t u, const typename Units::Vector (&row)[C],
                          typename Units::Sum (&sums)[R][C]) {
  unrolled<R>([&](int r) LLMQ_UNROLLED {
    const typename Units::Vector one = Units::all(a[r] + u);
    unrolled<C>([&](int c) LLMQ_UNROLLED { sums[r][c] = Product::add(sums[r][c], one, row[c]); });
  });
}

// body(term) adds to the sums the products of each term of what is a sum of terms.
template <class Units, int R, int C, class Body>
LLMQ_INLINE void for_terms(typename Units::Sum (&sums)[R][C], Body&& body) {
  for (int term = 0; term < Units::kTerms; term++) {
    if (term > 0) {
      unrolled<R>([&](int r) LLMQ_UNROLLED {
        unrolled<C>([&](int c) LLMQ_UNROLLED { sums[r][c] = Units::next_term(sums[r][c]); });
      });
    }
    body(term);
  }
}

// sums[r][c] += Σ_u a[r][u] · b[u][column + c·W…] over `units` units, for each term of a, `terms` units apart.
template <class Units, class Product, int R, int C>
LLMQ_INLINE void add_products(const typename Units::Unit* const* a, int64_t terms, const typename Units::Unit* b,
                              int64_t stride, int units, typename Units::Sum (&sums)[R][C]) {
  for_terms<Units>(sums, [&](int term) LLMQ_UNROLLED {
    const typename Units::Unit* next = b;
    for (int u = 0; u < units; u++, next += stride) {
      typename Units::Vector row[C];
      unrolled<C>([&](int c) LLMQ_UNROLLED { row[c] = Units::load(next + c * W); });
      add_unit<Units, Product>(a, term * terms + u, row, sums);
    }
  });
}

// The state of softmax over some keys: largest score (in powers of 2), sum of weights, weighted sum of V. Of rows.
struct Partial {
  float* maximum;  // [rows]
  float* total;    // [rows]
  float* mixed;    // [rows, stride], in the units' order
};

template <class Units>
class Task {
  using Unit = typename Units::Unit;
  using Sum = typename Units::Sum;

 public:
  explicit Task(const AttentionWork& work)
      : work_(work),
        batch_(work.batch),
        call_(work.call),
        job_(work.job),
        task_(work.task),
        load_strided_(work.call.keys.num_kv_heads) {
    group_ = call_.group_size();
    rows_ = job_.num_rows;
    dim_k_ = call_.keys.head_dim;
    dim_v_ = call_.values.head_dim;
    units_ = (dim_k_ + Units::kDepth - 1) / Units::kDepth;
    stride_q_ = (units_ + W - 1) / W * W;
    stride_v_ = (dim_v_ + Units::kColumnsOfValues - 1) / Units::kColumnsOfValues * Units::kColumnsOfValues;
    first_position_ = first_position_of(job_);
    // Where there is a softcap, scores become powers of 2 behind it.
    factor_ = call_.softcap != 0 ? call_.scale / call_.softcap : call_.scale * kLog2E;
    are_in_place_ = false;
    with_format(call_.keys.format, [this](auto format) {
      are_in_place_ = call_.keys.order == KVOrder::by_unit && holds_units(format);
    });
    scales_values_ = call_.values.scales != nullptr || call_.values.static_scale != 1.0f;
    float* scratch = work.scratch;
    const auto take = [&scratch](int64_t floats) {
      float* taken = scratch;
      scratch += (floats + 15) / 16 * 16;
      return taken;
    };
    keys_ = reinterpret_cast<Unit*>(take(kKeySpan * units_));
    values_ = reinterpret_cast<Unit*>(take(kKeySpan / Units::kDepth * stride_v_));
    key_scales_ = take(kKeySpan);
    value_scales_ = take(kKeySpan);
    span_ = {take(rows_), take(rows_), take(rows_ * stride_v_)};
    whole_ = {take(rows_), take(rows_), take(rows_ * stride_v_)};
    old_ = take(rows_);
    added_ = take(rows_);
    query_scales_ = take(rows_);
    query_offsets_ = reinterpret_cast<int32_t*>(take(rows_));
    queries_ = reinterpret_cast<Unit*>(take(int64_t{rows_} * Units::kTerms * stride_q_));
    scores_ = take(kDirectRows * kKeySpan);
    weights_ = reinterpret_cast<Unit*>(take(kDirectRows * kWeightUnits));
  }

  void run() {
    prepare_queries();
    for (int row = 0; row < rows_; row++) clear(whole_, row);
    const bool is_alone = job_.num_tasks == 1;
    for (int span = task_.first_span; span < task_.end_span; span++) {
      if (!is_alone) span_ = partial_of(span);
      sum_span(span);
      if (is_alone) merge(span_);
    }
    if (is_alone) {
      write();
    } else if (work_.pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      for (int span = job_.first_span; span < job_.end_span; span++) merge(partial_of(span));
      write();
    }
  }

 private:
  static constexpr int kWeightUnits = Units::kTerms * kKeySpan / Units::kDepth;  // of a row

  int first_position_of(const AttentionJob& job) const {
    return batch_.lengths[job.sequence] - batch_.num_queries(job.sequence) + job.first_query;
  }
  int query(int row) const { return row / group_ % job_.num_queries; }
  int position(int row) const { return first_position_ + query(row); }
  int64_t token(int row) const { return batch_.query_start[job_.sequence] + job_.first_query + query(row); }
  int head(int row) const {
    return (job_.first_head + row / (group_ * job_.num_queries)) * group_ + row % group_;
  }

  Partial partial_of(int span) const {
    float* start = work_.partials + (job_.partials + int64_t{span - job_.first_span} * rows_) * (stride_v_ + 2);
    return {start, start + rows_, start + 2 * rows_};
  }

  void clear(const Partial& partial, int row) {
    partial.maximum[row] = kNoMaximum;
    partial.total[row] = 0;
    memset(partial.mixed + row * stride_v_, 0, static_cast<size_t>(stride_v_) * 4);
  }

  void prepare_queries() {
    if constexpr (!Units::kTakesQueries) {
      memset(queries_, 0, static_cast<size_t>(rows_ * Units::kTerms * stride_q_) * sizeof(Unit));
    }
    for (int row = 0; row < rows_; row++) {
      query_scales_[row] = factor_;
      query_offsets_[row] = 0;
      if constexpr (!Units::kTakesQueries) {
        const int64_t at = token(row) * call_.query_stride + int64_t{head(row)} * dim_k_;
        Unit* to = queries_ + int64_t{row} * Units::kTerms * stride_q_;
        if (call_.is_float32) {
          Units::prepare_query(static_cast<const float*>(call_.queries) + at, dim_k_, to, stride_q_,
                               query_scales_[row], query_offsets_[row]);
        } else {
          Units::prepare_query(static_cast<const bf16*>(call_.queries) + at, dim_k_, to, stride_q_,
                               query_scales_[row], query_offsets_[row]);
        }
      }
    }
  }

  // Where a unit is a pair of the caller's own numbers: those.
  const Unit* query_units(int row) const {
    if constexpr (Units::kTakesQueries) {
      const int64_t at = token(row) * call_.query_stride + int64_t{head(row)} * dim_k_;
      return reinterpret_cast<const Unit*>(static_cast<const bf16*>(call_.queries) + at);
    } else {
      return queries_ + int64_t{row} * Units::kTerms * stride_q_;
    }
  }

  void sum_span(int span) {
    Span* located = here_;
    here_ = next_;
    next_ = located;
    if (here_->start != span * kKeySpan) locate(job_, span, *here_);
    const int rows = rows_ / job_.num_heads;
    const bool is_direct = rows <= kDirectRows;
    // After the task's last span comes, probably, another task of this thread.
    const bool is_last = span + 1 == task_.end_span;
    const AttentionJob* job = is_last ? work_.next_job : &job_;
    ahead_.stop();
    if (job != nullptr) {
      locate(*job, is_last ? work_.next_task->first_span : span + 1, *next_);
      const int tiles = here_->end_tile() - here_->first_tile();
      ahead_.start(*next_, call_, job->num_heads, int64_t{2 * kKeyTile} * tiles * job_.num_heads * num_blocks(rows));
    }
    for (int head = 0; head < job_.num_heads; head++) {
      load_scales(call_.keys, job_.first_head + head, key_scales_);
      load_scales(call_.values, job_.first_head + head, value_scales_);
      if (is_direct) {
        add_rows(head * rows, rows, true);
      } else {
        make_keys(here_->first_tile(), here_->end_tile());
        load_values();
        for (int row = 0; row < rows; row += kRowBlock) {
          add_rows(head * rows + row, least(kRowBlock, rows - row), false);
        }
      }
      if (head + 1 < job_.num_heads) here_->to_next_head(call_);
    }
    ahead_.order_rest();
    here_->start = -1;
  }

  // Keys of a sequence in one block.
  struct Run {
    int first, count;  // counted from the start of the span
    int offset;
    int64_t block;
  };

  static constexpr int kTiles = kKeyTile / kTileTokens;

  // Where the keys of a span and their values are stored, for one KV head.
  struct Span {
    int start = -1;
    int first = 0, end = 0;  // of the keys that some query sees, counted from `start`
    int num_runs = 0;
    Run runs[kKeySpan];
    // Of the tiles that have such keys. Whatever else is in them does not belong to the queries' sequence, was not written,
    // or is another's by now, may be anything, and is not read: zeros are.
    const uint8_t* keys[kKeySpan];  // unless they lie by units
    const uint8_t* values[kKeySpan];
    const uint32_t* tiles[kKeySpan / kTileTokens];  // if they do: of as many keys

    int first_tile() const { return first / kKeyTile; }
    int end_tile() const { return (end + kKeyTile - 1) / kKeyTile; }
    void to_next_head(const AttentionCall& call) {
      const int64_t to_key = call.keys.head_stride(), to_value = call.values.head_stride();
      if (call.keys.order == KVOrder::by_unit) {
        for (int tile = kTiles * first_tile(); tile < kTiles * end_tile(); tile++) tiles[tile] += to_key / kTileUnit;
      } else {
        for (int i = first; i < end; i++) keys[i] += to_key;
      }
      for (int i = first; i < end; i++) values[i] += to_value;
    }
  };

  // The intrinsic, but for GCC 12: a function that does nothing else has no effect to it, and is left out.
  LLMQ_INLINE static void order_lines(const void* from, int64_t bytes) {
    const char* line = static_cast<const char*>(from);
    for (const char* end = line + bytes; line < end; line += 64) asm volatile("prefetcht1 %0" : : "m"(*line));
  }

  // An order is dropped where too many are on their way. It is made again, shortly before, for the first-level cache, which
  // drops none.
  LLMQ_INLINE static void order_near(const uint8_t* const* heads, int count, int64_t bytes) {
    for (int i = 0; i < count; i++) {
      const char* line = reinterpret_cast<const char*>(heads[i]);
      for (const char* end = line + bytes; line < end; line += 64) asm volatile("prefetcht0 %0" : : "m"(*line));
    }
  }

  // Blocks lie anywhere, where no prefetcher of a CPU finds them: while a span is computed, the lines of the next one are
  // ordered, in the order in which they lie in memory, and evenly: memory would rest in between, and of many at once a CPU
  // drops some. Work is counted in steps, of a key's scores or its part of a sum, for a block of rows.
  class Ahead {
   public:
    void stop() { line_ = until_ = nullptr, piece_ = num_pieces_ = 0; }
    // Some heads of a span, while so many steps are made.
    void start(const Span& span, const AttentionCall& call, int heads, int64_t steps) {
      stop();
      num_pieces_ = list(span, call, heads);
      const int64_t bytes = (call.keys.head_bytes() + call.values.head_bytes()) * heads * (span.end - span.first);
      rate_ = bytes * 1024 / most<int64_t>(steps, 1) + 1;
      credit_ = 0;
    }
    LLMQ_INLINE void order(int steps) { add(steps * rate_); }
    // Of so many steps this part: a step may be less than what is done at once.
    LLMQ_INLINE int64_t share_of(int64_t steps, int64_t part, int64_t whole) const { return rate_ * steps * part / whole; }
    // No call in here: one would take all sums of a loop out of their registers.
    LLMQ_INLINE void add(int64_t share) {
      credit_ += share;
      for (; credit_ >= 65536; credit_ -= 65536) {
        if (line_ >= until_) {
          if (piece_ == num_pieces_) return;
          line_ = pieces_[piece_].from;
          until_ = pieces_[piece_++].to;
        }
        asm volatile("prefetcht1 %0" : : "m"(*line_));
        line_ += 64;
      }
    }
    void order_rest() {
      add(int64_t{1} << 40);
      credit_ = 0;
    }

   private:
    struct Piece {
      const char* from;
      const char* to;
    };

    // The keys of a tile, then their values; where heads lie by token and others are between those of a token, token by
    // token.
    int list(const Span& span, const AttentionCall& call, int heads) {
      int count = 0;
      for (int next = span.first; next < span.end;) {
        int last = least((next / kTileTokens + 1) * kTileTokens, span.end) - 1;
        const auto is_run = [&](const KVPlane& plane, const uint8_t* const* at) {
          return plane.order != KVOrder::by_token || at[last] - at[next] == (last - next) * plane.head_bytes() * heads;
        };
        if (!is_run(call.keys, span.keys) || !is_run(call.values, span.values)) last = next;
        const bool begins_tile = next % kTileTokens == 0 || next == span.first;
        for (const KVPlane* plane : {&call.keys, &call.values}) {
          const uint8_t* const* at = plane == &call.keys ? span.keys : span.values;
          const int64_t bytes = plane->head_bytes() * heads;
          if (plane->order == KVOrder::by_token) {
            put(at[next], at[last] + bytes, pieces_[count++]);
          } else if (begins_tile) {
            const uint8_t* tile = plane->order == KVOrder::by_unit
                                      ? reinterpret_cast<const uint8_t*>(span.tiles[next / kTileTokens])
                                      : at[next] - next % kTileTokens * plane->head_bytes();
            put(tile, tile + kTileTokens * bytes, pieces_[count++]);
          }
        }
        next = last + 1;
      }
      return count;
    }
    static void put(const uint8_t* from, const uint8_t* to, Piece& piece) {
      piece = {reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) & ~uintptr_t{63}),
               reinterpret_cast<const char*>(to)};
    }

    Piece pieces_[2 * kKeySpan];
    int piece_ = 0, num_pieces_ = 0;
    const char* line_ = nullptr;
    const char* until_ = nullptr;
    int64_t rate_ = 0;    // 1/65536 lines a step
    int64_t credit_ = 0;  // likewise
  };

  void locate(const AttentionJob& job, int span, Span& to) const {
    const int first_position = first_position_of(job);
    to.start = span * kKeySpan;
    to.first = most(batch_.first_key(first_position) - to.start, 0);
    to.end = most(least(first_position + job.num_queries - to.start, kKeySpan), to.first);
    to.num_runs = 0;
    for (int i = to.first_tile() * kKeyTile; i < to.first; i++) to.keys[i] = to.values[i] = kNothing;
    for (int i = to.end; i < to.end_tile() * kKeyTile; i++) to.keys[i] = to.values[i] = kNothing;
    const int64_t* table = batch_.block_table + job.sequence * batch_.table_stride;
    const int size = batch_.block_tokens;
    int column = (to.start + to.first) / size, offset = (to.start + to.first) % size;
    for (int i = to.first; i < to.end; offset = 0) {
      const int64_t block = table[column++];
      const int count = least(size - offset, to.end - i);
      to.runs[to.num_runs++] = {i, count, offset, block};
      const Run& run = to.runs[to.num_runs - 1];
      if (call_.keys.order == KVOrder::by_unit) {
        for (int j = i / kTileTokens * kTileTokens; j < i + count; j += kTileTokens) {
          const uint8_t* tile = call_.keys.head(block, offset + j - i, job.first_head);
          to.tiles[j / kTileTokens] = reinterpret_cast<const uint32_t*>(tile);
        }
      } else {
        locate_heads(call_.keys, run, job.first_head, to.keys);
      }
      locate_heads(call_.values, run, job.first_head, to.values);
      for (const KVPlane* plane : {&call_.keys, &call_.values}) {
        if (plane->scales) order_lines(plane->scale(block, offset, job.first_head), count * plane->num_kv_heads * 2);
      }
      i += count;
    }
    if (call_.keys.order == KVOrder::by_unit && to.first < to.end) fill_tiles(to);
  }
  static void locate_heads(const KVPlane& plane, const Run& run, int head, const uint8_t** to) {
    const bool in_tiles = plane.order == KVOrder::by_head;
    const int64_t stride = plane.head_bytes() * (in_tiles ? 1 : plane.num_kv_heads);
    for (int i = 0; i < run.count;) {
      const int offset = run.offset + i, rest = run.count - i;
      const int count = in_tiles ? least(rest, kTileTokens - offset % kTileTokens) : rest;
      const uint8_t* first = plane.head(run.block, offset, head);
      for (int j = 0; j < count; j++) to[run.first + i + j] = first + j * stride;
      i += count;
    }
  }
  // Tiles of which no key is seen are any: their scores are masked.
  static void fill_tiles(Span& to) {
    const int first = to.first / kTileTokens, end = (to.end + kTileTokens - 1) / kTileTokens;
    for (int tile = kTiles * to.first_tile(); tile < first; tile++) to.tiles[tile] = to.tiles[first];
    for (int tile = end; tile < kTiles * to.end_tile(); tile++) to.tiles[tile] = to.tiles[end - 1];
  }

  void load_scales(const KVPlane& plane, int kv_head, float* scales) const {
    const F32 same = F32::all(plane.static_scale);
    for (int i = 0; i < kKeySpan; i += W) same.store(scales + i);
    if (plane.scales == nullptr) return;
    for (int run = 0; run < here_->num_runs; run++) {
      const auto [first, count, offset, block] = here_->runs[run];
      load_strided_(plane.scale(block, offset, kv_head), count, scales + first);
    }
  }

  // body(Format<…>{}), by the format of a plane.
  template <class Body>
  LLMQ_INLINE static void with_format(KVFormat format, Body&& body) {
    switch (format) {
      case KVFormat::fp32: return with_readable<KVFormat::fp32>(body);
      case KVFormat::fp16: return with_readable<KVFormat::fp16>(body);
      case KVFormat::bf16: return with_readable<KVFormat::bf16>(body);
      case KVFormat::int8: return with_readable<KVFormat::int8>(body);
      case KVFormat::fp8: return with_readable<KVFormat::fp8>(body);
      case KVFormat::int4: return with_readable<KVFormat::int4>(body);
    }
  }
  template <KVFormat kFormat> struct Format {};
  template <KVFormat kFormat>
  static constexpr bool holds_units(Format<kFormat>) {
    return Units::template kTileHoldsUnits<kFormat>;
  }
  template <KVFormat kFormat, class Body>
  LLMQ_INLINE static void with_readable(Body& body) {
    if constexpr (Units::takes(kFormat)) body(Format<kFormat>{});
  }

  // keys_[tile, unit, key] of tiles [first, end), unless the store's own tiles hold that.
  void make_keys(int first, int end, bool at_start = false) {
    if (are_in_place_) return;
    with_format(call_.keys.format, [&](auto format) {
      for (int tile = first; tile < end; tile++) {
        Unit* to = keys_ + (at_start ? 0 : tile * kKeyTile * units_);
        for (int key = 0; key < kKeyTile; key += W) {
          spread(format, tile * kKeyTile + key, to + key);
        }
      }
    });
  }
  // W keys' units, kKeyTile apart.
  template <KVFormat kFormat>
  void spread(Format<kFormat>, int key, Unit* to) {
    const uint8_t* const* heads = here_->keys + key;
    const uint8_t* plain[W];
    if (call_.keys.order == KVOrder::by_unit) {
      const uint32_t* column = here_->tiles[key / kTileTokens] + key % kTileTokens;
      if constexpr (Units::template kSpreads<kFormat>) return Units::template spread_keys<kFormat>(column, dim_k_, to);
      gather_keys(column, plain);
      heads = plain;
    }
    for (int first = 0; first < units_; first += W) {
      const int count = least(W, units_ - first);
      F32 rows[W];
      for (int i = 0; i < W; i++) rows[i] = Units::template load_key<kFormat>(heads[i], dim_k_, first, count);
      transpose(rows);
      for (int u = 0; u < count; u++) rows[u].store(reinterpret_cast<float*>(to + (first + u) * kKeyTile));
    }
  }
  // W heads by themselves out of a tile.
  void gather_keys(const uint32_t* column, const uint8_t* (&plain)[W]) {
    const int units = static_cast<int>(call_.keys.head_bytes() / kTileUnit);
    for (int i = 0; i < W; i++) plain[i] = reinterpret_cast<const uint8_t*>(plain_[i]);
    for (int first = 0; first < units; first += W) {
      const int count = least(W, units - first);
      F32 rows[W];
      for (int u = 0; u < W; u++) {
        rows[u] = u < count ? F32::load(reinterpret_cast<const float*>(column + (first + u) * kTileTokens)) : F32::zero();
      }
      transpose(rows);
      for (int i = 0; i < W; i++) rows[i].store(plain_[i] + first, count);
    }
  }

  // values_[key / kDepth, d]; what lies between dim_v_ and stride_v_ is summed and left out.
  void load_values() {
    with_format(call_.values.format, [this](auto format) { join_values(format); });
  }
  template <KVFormat kFormat>
  void join_values(Format<kFormat>) {
    constexpr int kAtOnce = Units::kColumnsOfValues / W;
    for (int key = here_->first_tile() * kKeyTile; key < here_->end_tile() * kKeyTile; key += Units::kDepth) {
      Unit* to = values_ + key / Units::kDepth * stride_v_;
      for (int column = 0; column < stride_v_; column += Units::kColumnsOfValues) {
        typename Units::Vector joined[kAtOnce];
        Units::template join_values<kFormat>(here_->values + key, dim_v_, column, joined);
        for (int c = 0; c < kAtOnce; c++) Units::store(joined[c], to + column + c * W);
      }
    }
  }

  // A tile of which no row sees anything changes nothing: rows are summed in any company.
  //
  // Directly: numbers of K and V go from the store into sums, which are the same. Else they are in keys_ and values_ by now.
  void add_rows(int row, int count, bool is_direct) {
    const int first = most(batch_.first_key(position(row)) - here_->start, 0);
    const int end = least(position(row + count - 1) + 1 - here_->start, kKeySpan);
    if (first >= end) {
      for (int r = row; r < row + count; r++) clear(span_, r);
      return;
    }
    const int first_tile = first / kKeyTile, end_tile = (end + kKeyTile - 1) / kKeyTile;
    const Unit* queries[kDirectRows];
    for (int r = 0; r < count; r++) queries[r] = query_units(row + r);
    for (int tile = first_tile; tile < end_tile; tile++) {
      if (is_direct) make_keys(tile, tile + 1, true);
      score_tile(queries, row, count, tile, is_direct);
    }
    weigh_and_mix(row, count, first_tile * kKeyTile, end_tile * kKeyTile, is_direct);
  }

  // As equal as can be: a block's work on K and V is for all of its rows.
  static constexpr int num_blocks(int rows) { return (rows + kRowBlock - 1) / kRowBlock; }
  template <int kRows> struct Rows {};
  // body(first, Rows<…>{}) for each block of `count` rows.
  template <class Body>
  LLMQ_INLINE static void for_blocks(int count, Body&& body) {
    const int blocks = num_blocks(count);
    for (int block = 0; block < blocks; block++) {
      const int first = count * block / blocks;
      switch (count * (block + 1) / blocks - first) {
        case 1: body(first, Rows<1>{}); break;
        case 2: body(first, Rows<2>{}); break;
        case 3: body(first, Rows<3>{}); break;
        case 4: body(first, Rows<4>{}); break;
        case 5: body(first, Rows<5>{}); break;
        case 6: body(first, Rows<6>{}); break;
      }
    }
  }

  // Scores of a tile's keys.
  void score_tile(const Unit* const* queries, int row, int count, int tile, bool is_direct) {
    // Where the units of the first W keys lie, of the next W, …
    const Unit* columns[kKeyTile / W];
    const Unit* made = keys_ + (is_direct ? 0 : tile * kKeyTile * units_);
    for (int c = 0; c < kKeyTile / W; c++) {
      const int key = tile * kKeyTile + c * W;
      columns[c] = are_in_place_ ? reinterpret_cast<const Unit*>(here_->tiles[key / kTileTokens]) + key % kTileTokens
                                 : made + c * W;
    }
    const int stride = are_in_place_ ? kTileTokens : kKeyTile;
    for_blocks(count, [&](int first, auto rows) {
      score_block(rows, queries + first, row + first, columns, stride, tile, scores_of(first));
    });
  }
  template <int R>
  void score_block(Rows<R>, const Unit* const* a, int row, const Unit* const* columns, int stride, int tile,
                   float* scores) {
    constexpr int kColumnsOfTile = kKeyTile / W, kUnitsAtOnce = W == 16 ? 4 : 16;
    const int parts = Units::kTerms * (kColumnsOfTile / kColumns) * ((units_ + kUnitsAtOnce - 1) / kUnitsAtOnce);
    const int part = (kKeyTile + parts - 1) / parts;
    for (int column = 0; column < kColumnsOfTile; column += kColumns) {
      const Unit* const* from = columns + column;
      Sum sums[R][kColumns] = {};
      for_terms<Units>(sums, [&](int term) LLMQ_UNROLLED {
        for (int u = 0; u < units_;) {
          ahead_.order(part);
          const int end = least(u + kUnitsAtOnce, units_);
#pragma GCC unroll 1
          for (; u < end; u++) {
            typename Units::Vector keys[kColumns];
            unrolled<kColumns>([&](int c) LLMQ_UNROLLED { keys[c] = Units::load_keys(from[c] + u * stride); });
            add_unit<Units, typename Units::Scores>(a, term * stride_q_ + u, keys, sums);
          }
        }
      });
      unrolled<R>([&](int r) LLMQ_UNROLLED {
        unrolled<kColumns>([&](int c) LLMQ_UNROLLED {
          store_score(sums[r][c], row + r, tile * kKeyTile + (column + c) * W, scores + r * kKeySpan);
        });
      });
    }
  }
  LLMQ_INLINE void store_score(Sum sum, int row, int key, float* scores) const {
    (Units::score(sum, query_offsets_[row]) * F32::load(key_scales_ + key) * F32::all(query_scales_[row])).store(scores + key);
  }
  // Of the first-th row that is added.
  float* scores_of(int first) { return scores_ + first * kKeySpan; }

  void weigh_and_mix(int row, int count, int first, int end, bool is_direct) {
    float factor[kDirectRows];
    for (int r = 0; r < count; r++) {
      const float largest = weigh(row + r, first, end, scores_of(r));
      factor[r] = Units::store_weights(scores_of(r), largest, first, end, weights_ + r * kWeightUnits);
    }
    if (is_direct) {
      with_format(call_.values.format, [&](auto format) {
        for_blocks(count, [&](int block, auto rows) {
          mix_directly(format, rows, weights_ + block * kWeightUnits, row + block, first, end, factor + block);
        });
      });
    } else {
      for_blocks(count, [&](int block, auto rows) { mix_copied(rows, block, row + block, first, end, factor + block); });
    }
  }
  template <int R>
  void mix_copied(Rows<R>, int block, int row, int first, int end, const float* factor) {
    const Unit* a[R];
    for (int r = 0; r < R; r++) a[r] = weights_ + (block + r) * kWeightUnits + first / Units::kDepth;
    const Unit* values = values_ + first / Units::kDepth * stride_v_;
    const int units = (end - first) / Units::kDepth;
    int column = 0;
    for (; column + kColumns * W <= stride_v_; column += kColumns * W) {
      mix<R, kColumns>(a, values + column, units, row, column, factor);
    }
    for (; column < stride_v_; column += W) mix<R, 1>(a, values + column, units, row, column, factor);
  }

  // A row's scores of the span's keys [first, end) -> weights, times the scales of V. Returns the largest, or 1e-30.
  float weigh(int row, int first, int end, float* scores) {
    if (call_.softcap != 0) {
      const F32 softcap = F32::all(call_.softcap * kLog2E);
      for (int key = first; key < end; key += W) (tanh(F32::load(scores + key)) * softcap).store(scores + key);
    }
    const int last_seen = position(row) - here_->start;
    const int first_seen = batch_.first_key(position(row)) - here_->start;
    F32 top = F32::all(kNoMaximum);
    if (first_seen > first || last_seen < end - 1) {
      const F32 masked = F32::all(kMasked), lowest = F32::all(static_cast<float>(first_seen));
      const F32 highest = F32::all(static_cast<float>(last_seen));
      for (int key = first; key < end; key += W) {
        const F32 index = F32::load(kIndex) + F32::all(static_cast<float>(key));
        F32 score = where_below(index, lowest, masked, F32::load(scores + key));
        score = where_below(highest, index, masked, score);
        score.store(scores + key);
        top = larger(score, top);
      }
    } else {
      for (int key = first; key < end; key += W) top = larger(F32::load(scores + key), top);
    }
    const float maximum = top.largest();
    const F32 shift = F32::all(maximum);
    F32 total = F32::zero(), largest = F32::all(1e-30f);
    for (int key = first; key < end; key += W) {
      F32 weight = exp2_of_negative(F32::load(scores + key) - shift);
      total = total + weight;
      if (scales_values_) weight = weight * F32::load(value_scales_ + key);
      weight.store(scores + key);
      if constexpr (Units::kSumsExactly) largest = larger(weight, largest);
    }
    span_.maximum[row] = maximum;
    span_.total[row] = total.sum();
    return largest.largest();
  }

  template <int R, int C>
  void mix(const Unit* const* a, const Unit* values, int units, int row, int column, const float* factor) {
    ahead_.order(units * Units::kDepth * C * W / static_cast<int>(stride_v_));
    Sum sums[R][C] = {};
    add_products<Units, typename Units::Mixture, R, C>(a, kKeySpan / Units::kDepth, values, stride_v_, units, sums);
    float* mixed = span_.mixed + row * stride_v_ + column;
    unrolled<R>([&](int r) LLMQ_UNROLLED {
      unrolled<C>([&](int c) LLMQ_UNROLLED {
        Units::mixed(sums[r][c], factor[r]).store(mixed + r * stride_v_ + c * W);
      });
    });
  }

  // Columns whose sums stay in registers.
  static constexpr int columns_at_once(int rows) {
    if (W == 16) return rows * kColumns * Units::kTerms <= 24 ? kColumns : 2;
    return Units::kSumsExactly && rows <= 3 ? 4 : 2;
  }

  // weights: [R, kTerms, kKeySpan / kDepth]
  template <int R, KVFormat kFormat>
  void mix_directly(Format<kFormat> format, Rows<R>, const Unit* weights, int row, int first, int end, const float* factor) {
    constexpr int C = columns_at_once(R), kRest = Units::kColumnsOfValues / W;
    int column = 0;
    for (; column + C * W <= stride_v_; column += C * W) mix_columns<R, C>(format, weights, row, first, end, column, factor);
    if constexpr (kRest < C) {
      for (; column < stride_v_; column += kRest * W) {
        mix_columns<R, kRest>(format, weights, row, first, end, column, factor);
      }
    }
  }
  template <int R, int C, KVFormat kFormat>
  LLMQ_INLINE void mix_columns(Format<kFormat>, const Unit* weights, int row, int first, int end, int column,
                               const float* factor) {
    constexpr int kUnits = kKeySpan / Units::kDepth;
    constexpr int kJoined = W == 16 ? C : least(C, 2);  // at once, as registers allow
    constexpr int kKeys = W == 16 ? 4 : 16;  // between two orders
    const int64_t share = ahead_.share_of(kKeys, C * W, stride_v_);
    const int64_t value_bytes = call_.values.head_bytes();
    Sum sums[R][C][Units::kTerms] = {};
    const uint8_t* const* heads = here_->values + first;
    const Unit* weight = weights + first / Units::kDepth;
    for (const uint8_t* const* last = here_->values + end; heads < last;) {
      ahead_.add(share);
      if (!Units::kSumsExactly && column == 0 && heads + kKeyTile < last) order_near(heads + kKeyTile, kKeys, value_bytes);
#pragma GCC unroll 1
      for (int i = 0; i < kKeys; i += Units::kDepth, heads += Units::kDepth, weight++) {
        unrolled<C / kJoined>([&](int part) LLMQ_UNROLLED {
          typename Units::Vector values[kJoined];
          Units::template join_values<kFormat>(heads, dim_v_, column + part * kJoined * W, values);
          unrolled<R>([&](int r) LLMQ_UNROLLED {
            unrolled<Units::kTerms>([&](int term) LLMQ_UNROLLED {
              const typename Units::Vector one = Units::all(weight + (r * Units::kTerms + term) * kUnits);
              unrolled<kJoined>([&](int i) LLMQ_UNROLLED {
                Sum& sum = sums[r][part * kJoined + i][term];
                sum = Units::Mixture::add(sum, one, values[i]);
              });
            });
          });
        });
      }
    }
    float* mixed = span_.mixed + row * stride_v_ + column;
    unrolled<R>([&](int r) LLMQ_UNROLLED {
      unrolled<C>([&](int c) LLMQ_UNROLLED {
        Units::mixed(Units::total(sums[r][c]), factor[r]).store(mixed + r * stride_v_ + c * W);
      });
    });
  }

  void merge(const Partial& partial) {
    for (int row = 0; row < rows_; row += W) {
      const int n = least(W, rows_ - row);
      const F32 one = F32::load(whole_.maximum + row, n), other = F32::load(partial.maximum + row, n);
      const F32 maximum = larger(one, other), old = exp2(one - maximum), added = exp2(other - maximum);
      maximum.store(whole_.maximum + row, n);
      old.store(old_ + row, n);
      added.store(added_ + row, n);
      fma(F32::load(whole_.total + row, n), old, F32::load(partial.total + row, n) * added).store(whole_.total + row, n);
    }
    for (int row = 0; row < rows_; row++) {
      const F32 old = F32::all(old_[row]), added = F32::all(added_[row]);
      float* to = whole_.mixed + row * stride_v_;
      const float* from = partial.mixed + row * stride_v_;
      for (int d = 0; d < stride_v_; d += W) fma(F32::load(to + d), old, F32::load(from + d) * added).store(to + d);
    }
  }

  void write() {
    for (int row = 0; row < rows_; row++) {
      const F32 total = F32::all(whole_.total[row]);
      const int64_t at = token(row) * call_.output_stride + int64_t{head(row)} * dim_v_;
      for (int d = 0; d < dim_v_; d += W) {
        const int n = least(W, dim_v_ - d);
        const F32 result = Units::load_mixed(whole_.mixed + row * stride_v_, d) / total;
        if (call_.is_float32) {
          result.store(static_cast<float*>(call_.output) + at + d, n);
        } else {
          result.store(static_cast<bf16*>(call_.output) + at + d, n);
        }
      }
    }
  }

  static constexpr float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  const AttentionWork& work_;
  const AttentionBatch& batch_;
  const AttentionCall& call_;
  const AttentionJob& job_;
  const AttentionTask& task_;
  StridedLoad load_strided_;
  int group_, rows_, dim_k_, dim_v_, units_, first_position_;
  int64_t stride_q_, stride_v_;
  Span spans_[2];
  Span* here_ = spans_;
  Span* next_ = spans_ + 1;
  Ahead ahead_;
  float factor_;  // of scores
  bool scales_values_;
  bool are_in_place_;  // the keys' units: in the store
  alignas(64) float plain_[W][kMostHeadDim];
  Unit* keys_;
  Unit* values_;
  float* key_scales_;
  float* value_scales_;
  Partial span_, whole_;
  float* old_;
  float* added_;
  float* query_scales_;
  int32_t* query_offsets_;
  Unit* queries_;
  float* scores_;    // [kDirectRows, kKeySpan], of the rows that are being added
  Unit* weights_;    // [kDirectRows, kTerms, kKeySpan / kDepth]
};

// Whether units are for both planes of a call, whose queries are not float32's.
template <class Units>
bool suit(const AttentionCall& call) {
  const auto reads = [](const KVPlane& plane) { return Units::takes(plane.format) && Units::suits(plane.head_dim); };
  const bool reads_keys = Units::kReadsPlainKeys || call.keys.order == KVOrder::by_unit;
  return !call.is_float32 && reads_keys && reads(call.keys) && reads(call.values);
}

}  // namespace

void attend(const AttentionWork& work) {
#if defined(__AVX512F__)
  if (suit<ByteUnits<1>>(work.call)) {
    return work.batch.rounds_to_bytes ? Task<ByteUnits<1>>(work).run() : Task<ByteUnits<2>>(work).run();
  }
#else
  if (suit<WordUnits>(work.call)) return Task<WordUnits>(work).run();
#endif
#if defined(__AVX512BF16__)
  if (suit<PairUnits>(work.call)) return Task<PairUnits>(work).run();
#endif
  Task<FloatUnits>(work).run();
}

}  // namespace llmq::LLMQ_ISA
