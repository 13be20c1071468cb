// One task of paged attention; compiled once for each instruction set.

#include "attention.h"
#include "kernels.h"
#include "kv_units.h"

namespace llmq::LLMQ_ISA {
namespace {

constexpr int W = F32::kWidth;
constexpr int kRowBlock = 6;  // rows whose sums stay in registers
constexpr int kColumns = W == 16 ? 4 : 2;  // vectors of a row that do

// Below every score, and finite: a difference of two of them is a number.
constexpr float kNoMaximum = -1e30f;
constexpr float kMasked = -2e30f;

// In place of a head that is not to be read.
alignas(64) constexpr uint8_t kNothing[4 * kMostHeadDim] = {};

// sums[r][c] += Σ_u a[r][u] · b[u][column + c·W…] over `units` units.
template <class Units, int R, int C>
inline void add_products(const typename Units::Unit* const* a, const typename Units::Unit* b, int64_t stride, int units,
                         F32 (&sums)[R][C]) {
  for (int u = 0; u < units; u++) {
    F32 row[C];
    for (int c = 0; c < C; c++) row[c] = Units::load_products(b + u * stride + c * W);
    for (int r = 0; r < R; r++) {
      for (int c = 0; c < C; c++) sums[r][c] = Units::add_product(sums[r][c], a[r][u], row[c]);
    }
  }
}

// The state of softmax over some keys: largest score (in powers of 2), sum of weights, weighted sum of V. Of rows.
struct Partial {
  float* maximum;  // [rows]
  float* total;    // [rows]
  float* mixed;    // [rows, stride]
};

template <class Units>
class Task {
  using Unit = typename Units::Unit;

 public:
  explicit Task(const AttentionWork& work)
      : work_(work), batch_(work.batch), call_(work.call), job_(work.job), task_(work.task) {
    group_ = call_.group_size();
    rows_ = job_.num_rows;
    dim_k_ = call_.keys.head_dim;
    dim_v_ = call_.values.head_dim;
    stride_v_ = (dim_v_ + 15) / 16 * 16;
    first_position_ = first_position_of(job_);
    float* scratch = work.scratch;
    const auto take = [&scratch](int64_t floats) {
      float* taken = scratch;
      scratch += (floats + 15) / 16 * 16;
      return taken;
    };
    keys_ = reinterpret_cast<Unit*>(take(int64_t{kKeyTile} * ((dim_k_ + 15) / 16 * 16)));
    values_ = reinterpret_cast<Unit*>(take(kKeyTile * stride_v_));
    memset(values_, 0, static_cast<size_t>(kKeyTile * stride_v_) * 4);
    key_scales_ = take(kKeyTile);
    value_scales_ = take(kKeyTile);
    span_ = {take(rows_), take(rows_), take(rows_ * stride_v_)};
    whole_ = {take(rows_), take(rows_), take(rows_ * stride_v_)};
    queries_ = take(int64_t{rows_} * dim_k_);
  }

  void run() {
    prepare_queries();
    clear(whole_);
    const bool is_alone = job_.num_tasks == 1;
    for (int span = task_.first_span; span < task_.end_span; span++) {
      if (!is_alone) span_ = partial_of(span);
      clear(span_);
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

  void clear(const Partial& partial) {
    for (int row = 0; row < rows_; row++) {
      partial.maximum[row] = kNoMaximum;
      partial.total[row] = 0;
    }
    memset(partial.mixed, 0, static_cast<size_t>(rows_ * stride_v_) * 4);
  }

  // query_units_(row): where pairs are multiplied, the caller's own numbers.
  void prepare_queries() {
    if constexpr (Units::kDepth == 1) {
      for (int row = 0; row < rows_; row++) {
        const int64_t at = token(row) * call_.query_stride + int64_t{head(row)} * dim_k_;
        float* to = queries_ + int64_t{row} * dim_k_;
        for (int d = 0; d < dim_k_; d += W) {
          const int n = least(W, dim_k_ - d);
          (call_.is_float32 ? F32::load(static_cast<const float*>(call_.queries) + at + d, n)
                            : F32::load(static_cast<const bf16*>(call_.queries) + at + d, n)).store(to + d, n);
        }
      }
    }
  }

  const Unit* query_units(int row) const {
    if constexpr (Units::kDepth == 1) {
      return queries_ + int64_t{row} * dim_k_;
    } else {
      const int64_t at = token(row) * call_.query_stride + int64_t{head(row)} * dim_k_;
      return reinterpret_cast<const Unit*>(static_cast<const bf16*>(call_.queries) + at);
    }
  }

  void sum_span(int span) {
    const int first = batch_.first_key(first_position_);
    const int end = least((span + 1) * kKeySpan, position(rows_ - 1) + 1);
    for (int start = most(span * kKeySpan, first / kKeyTile * kKeyTile); start < end; start += kKeyTile) {
      if (next_.start != start) locate(job_, start, next_);
      tile_ = next_;
      if (start + kKeyTile >= end && span + 1 == task_.end_span && work_.next_task != nullptr) {
        const int from = batch_.first_key(first_position_of(*work_.next_job));
        locate(*work_.next_job, most(work_.next_task->first_span * kKeySpan, from / kKeyTile * kKeyTile), next_);
        next_.start = -1;  // another's
      } else {
        locate(job_, start + kKeyTile, next_);
      }
      const int rows = rows_ / job_.num_heads;
      for (int head = 0; head < job_.num_heads; head++) {
        load_scales(job_.first_head + head);
        load_keys();
        load_values();
        for (int row = 0; row < rows; row += kRowBlock) add_rows(head * rows + row, least(kRowBlock, rows - row));
        tile_.to_next_head(call_);
        next_.to_next_head(call_);
      }
      next_.to_head(call_, -job_.num_heads);
    }
  }

  // Where the keys of a tile and their values are stored, for one KV head.
  struct Tile {
    int start = -1;
    int first = 0, end = 0;  // of the keys that some query sees, counted from `start`
    const uint8_t* keys[kKeyTile];
    const uint8_t* values[kKeyTile];

    void to_head(const AttentionCall& call, int heads) {
      for (int i = first; i < end; i++) {
        keys[i] += heads * call.keys.head_bytes();
        values[i] += heads * call.values.head_bytes();
      }
    }
    void to_next_head(const AttentionCall& call) { to_head(call, 1); }
  };

  // Whatever does not belong to the queries' sequence, was not written, or is another's by now, may be anything, and is
  // not read: zeros are.
  void locate(const AttentionJob& job, int start, Tile& tile) const {
    const int first_position = first_position_of(job);
    tile.start = start;
    tile.first = most(batch_.first_key(first_position) - start, 0);
    tile.end = most(least(first_position + job.num_queries - start, kKeyTile), tile.first);
    for (int i = 0; i < kKeyTile; i++) tile.keys[i] = tile.values[i] = kNothing;
    const int64_t* table = batch_.block_table + job.sequence * batch_.table_stride;
    const int size = batch_.block_tokens;
    for (int i = tile.first; i < tile.end;) {
      const int64_t block = table[(start + i) / size];
      int offset = (start + i) % size;
      for (; offset < size && i < tile.end; offset++, i++) {
        tile.keys[i] = call_.keys.head(block, offset, job.first_head);
        tile.values[i] = call_.values.head(block, offset, job.first_head);
      }
    }
  }

  void load_scales(int kv_head) {
    // Where there is a softcap, scores become powers of 2 behind it.
    const float factor = call_.softcap != 0 ? call_.scale / call_.softcap : call_.scale * kLog2E;
    load_scales(call_.keys, kv_head, key_scales_, factor);
    load_scales(call_.values, kv_head, value_scales_, 1.0f);
    scales_values_ = call_.values.scales != nullptr || call_.values.static_scale != 1.0f;
  }

  void load_scales(const KVPlane& plane, int kv_head, float* scales, float factor) const {
    const F32 same = F32::all(factor * plane.static_scale);
    for (int i = 0; i < kKeyTile; i += W) same.store(scales + i);
    if (plane.scales == nullptr) return;
    const int64_t* table = batch_.block_table + job_.sequence * batch_.table_stride;
    const int size = batch_.block_tokens;
    for (int i = tile_.first; i < tile_.end;) {
      const int64_t block = table[(tile_.start + i) / size];
      int offset = (tile_.start + i) % size;
      const uint16_t* scale = plane.scale(block, offset, kv_head);
      for (; offset < size && i < tile_.end; offset++, i++, scale += plane.num_kv_heads) {
        scales[i] = factor * to_float(*scale);
      }
    }
  }

  void load_keys() {
    switch (call_.keys.format) {
      case KVFormat::fp32: return transpose_keys<KVFormat::fp32>();
      case KVFormat::fp16: return transpose_keys<KVFormat::fp16>();
      case KVFormat::bf16: return transpose_keys<KVFormat::bf16>();
      case KVFormat::int8: return transpose_keys<KVFormat::int8>();
      case KVFormat::fp8: return transpose_keys<KVFormat::fp8>();
      case KVFormat::int4: return transpose_keys<KVFormat::int4>();
    }
  }

  // Rows of a head lie apart from each other in blocks that lie anywhere, which no prefetcher of a CPU finds: while a
  // tile is taken, so are the lines of the next one ordered.
  static void order(const uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1); }

  // keys_[unit, key]
  template <KVFormat kFormat>
  void transpose_keys() {
    const int units = dim_k_ / Units::kDepth;
    for (int first = 0; first < units; first += W) {
      const int count = least(W, units - first);
      const int64_t byte = call_.keys.head_bytes() * first / units;
      for (int key = 0; key < kKeyTile; key += W) {
        F32 rows[W];
        for (int i = 0; i < W; i++) {
          order(next_.keys[key + i] + byte);
          rows[i] = Units::template load_units<kFormat>(tile_.keys[key + i], dim_k_, first, count);
        }
        transpose(rows);
        for (int u = 0; u < count; u++) rows[u].store(reinterpret_cast<float*>(keys_ + (first + u) * kKeyTile + key));
      }
    }
  }

  void load_values() {
    switch (call_.values.format) {
      case KVFormat::fp32: return join_values<KVFormat::fp32>();
      case KVFormat::fp16: return join_values<KVFormat::fp16>();
      case KVFormat::bf16: return join_values<KVFormat::bf16>();
      case KVFormat::int8: return join_values<KVFormat::int8>();
      case KVFormat::fp8: return join_values<KVFormat::fp8>();
      case KVFormat::int4: return join_values<KVFormat::int4>();
    }
  }

  // values_[key / kDepth, d]; what lies between dim_v_ and stride_v_ is summed and left out.
  template <KVFormat kFormat>
  void join_values() {
    const int64_t bytes = call_.values.head_bytes();
    for (int key = 0; key < kKeyTile; key += Units::kDepth) {
      Unit* to = values_ + key / Units::kDepth * stride_v_;
      for (int i = 0; i < Units::kDepth; i++) {
        for (int64_t byte = 0; byte < bytes; byte += 64) order(next_.values[key + i] + byte);
      }
      Units::template join_keys<kFormat>(tile_.values + key, dim_v_, to);
    }
  }

  void add_rows(int row, int count) {
    const int last = position(row + count - 1);
    if (last < tile_.start || batch_.first_key(position(row)) >= tile_.start + kKeyTile) return;
    switch (count) {
      case 1: return add_row_block<1>(row);
      case 2: return add_row_block<2>(row);
      case 3: return add_row_block<3>(row);
      case 4: return add_row_block<4>(row);
      case 5: return add_row_block<5>(row);
      case 6: return add_row_block<6>(row);
    }
  }

  template <int R>
  void add_row_block(int row) {
    alignas(64) float scores[R][kKeyTile];
    alignas(64) Unit weights[R][kKeyTile / Units::kDepth];
    const Unit* a[R];
    for (int r = 0; r < R; r++) a[r] = query_units(row + r);
    for (int column = 0; column < kKeyTile; column += kColumns * W) {
      F32 sums[R][kColumns];
      for (int r = 0; r < R; r++) for (int c = 0; c < kColumns; c++) sums[r][c] = F32::zero();
      add_products<Units, R, kColumns>(a, keys_ + column, kKeyTile, dim_k_ / Units::kDepth, sums);
      for (int r = 0; r < R; r++) for (int c = 0; c < kColumns; c++) sums[r][c].store(&scores[r][column + c * W]);
    }
    float decay[R];
    for (int r = 0; r < R; r++) {
      decay[r] = weigh(row + r, scores[r], weights[r]);
      a[r] = weights[r];
    }
    int column = 0;
    for (; column + kColumns * W <= stride_v_; column += kColumns * W) mix<R, kColumns>(a, row, column, decay);
    for (; column < stride_v_; column += W) mix<R, 1>(a, row, column, decay);
  }

  // Scores of a row -> weights; what was summed before is to be multiplied by the result.
  float weigh(int row, float* scores, Unit* weights) {
    const int position_of_row = position(row), first = batch_.first_key(position_of_row);
    const bool is_masked = first > tile_.start || position_of_row < tile_.start + kKeyTile - 1;
    const F32 softcap = F32::all(call_.softcap * kLog2E);
    F32 top = F32::all(span_.maximum[row]);
    for (int key = 0; key < kKeyTile; key += W) {
      F32 score = F32::load(scores + key) * F32::load(key_scales_ + key);
      if (call_.softcap != 0) score = tanh(score) * softcap;
      if (is_masked) {
        const F32 index = F32::load(kIndex) + F32::all(static_cast<float>(tile_.start + key));
        const F32 masked = F32::all(kMasked);
        score = where_below(index, F32::all(static_cast<float>(first)), masked, score);
        score = where_below(F32::all(static_cast<float>(position_of_row)), index, masked, score);
      }
      score.store(scores + key);
      top = larger(score, top);
    }
    const float maximum = top.largest();
    const F32 shift = F32::all(maximum);
    F32 total = F32::zero();
    for (int key = 0; key < kKeyTile; key += W) {
      const F32 weight = exp2(F32::load(scores + key) - shift);
      total = total + weight;
      Units::store_weights(scales_values_ ? weight * F32::load(value_scales_ + key) : weight, weights, key);
    }
    const float decay = power(span_.maximum[row] - maximum);
    span_.maximum[row] = maximum;
    span_.total[row] = span_.total[row] * decay + total.sum();
    return decay;
  }

  template <int R, int C>
  void mix(const Unit* const* a, int row, int column, const float* decay) {
    F32 sums[R][C];
    for (int r = 0; r < R; r++) {
      const float* mixed = span_.mixed + (row + r) * stride_v_ + column;
      for (int c = 0; c < C; c++) sums[r][c] = F32::load(mixed + c * W) * F32::all(decay[r]);
    }
    add_products<Units, R, C>(a, values_ + column, stride_v_, kKeyTile / Units::kDepth, sums);
    for (int r = 0; r < R; r++) {
      float* mixed = span_.mixed + (row + r) * stride_v_ + column;
      for (int c = 0; c < C; c++) sums[r][c].store(mixed + c * W);
    }
  }

  static float power(float x) {
    alignas(64) float lanes[W];
    exp2(F32::all(x)).store(lanes);
    return lanes[0];
  }

  void merge(const Partial& partial) {
    for (int row = 0; row < rows_; row++) {
      const float maximum = most(whole_.maximum[row], partial.maximum[row]);
      const float old = power(whole_.maximum[row] - maximum), added = power(partial.maximum[row] - maximum);
      whole_.maximum[row] = maximum;
      whole_.total[row] = whole_.total[row] * old + partial.total[row] * added;
      float* to = whole_.mixed + row * stride_v_;
      const float* from = partial.mixed + row * stride_v_;
      for (int d = 0; d < stride_v_; d += W) {
        fma(F32::load(to + d), F32::all(old), F32::load(from + d) * F32::all(added)).store(to + d);
      }
    }
  }

  void write() {
    for (int row = 0; row < rows_; row++) {
      const F32 total = F32::all(whole_.total[row]);
      const int64_t at = token(row) * call_.output_stride + int64_t{head(row)} * dim_v_;
      for (int d = 0; d < dim_v_; d += W) {
        const int n = least(W, dim_v_ - d);
        const F32 result = F32::load(whole_.mixed + row * stride_v_ + d) / total;
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
  int group_, rows_, dim_k_, dim_v_, first_position_;
  int64_t stride_v_;
  Tile tile_, next_;
  bool scales_values_ = false;
  Unit* keys_;
  Unit* values_;
  float* key_scales_;
  float* value_scales_;
  Partial span_, whole_;
  float* queries_;
};

}  // namespace

void attend(const AttentionWork& work) {
#if defined(__AVX512BF16__)
  const AttentionCall& call = work.call;
  const auto is_exact = [](KVFormat format) { return format != KVFormat::fp32 && format != KVFormat::fp16; };
  if (!call.is_float32 && is_exact(call.keys.format) && is_exact(call.values.format) && call.keys.head_dim % 2 == 0 &&
      call.values.head_dim % 2 == 0) {
    return Task<PairUnits>(work).run();
  }
#endif
  Task<FloatUnits>(work).run();
}

}  // namespace llmq::LLMQ_ISA
