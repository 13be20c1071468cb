// Causal attention over K and V in blocks: what is computed, and how a step of it is cut into work for threads.
//
// Softmax and the sum of V are computed for spans of kKeySpan keys, counted from the start of the sequence, whoever asks,
// and merged in order: what a query gets does not depend, in any bit, on the batch, the chunk, the number of threads, or
// where a long sequence was split among them. Of a span, tiles of kKeyTile keys that nobody sees are left out, which
// changes no sum.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kv_plane.h"

namespace llmq {

constexpr int kKeyTile = 64;
constexpr int kKeySpan = 256;
constexpr int kMostRows = 192;  // of a job, unless a single query has more heads

// One KV-cache group of a step, as runtime/attention/base.py's AttentionMetadata has it.
struct AttentionBatch {
  int32_t num_sequences;
  const int32_t* query_start;  // [num_sequences + 1]
  const int32_t* lengths;      // [num_sequences]: keys after this step
  const int64_t* block_table;  // [num_sequences, table_stride]
  int64_t table_stride;
  int32_t block_tokens;
  int32_t window;  // keys that a query sees, itself included; 0: all
  // What integers of K and V are multiplied with is rounded to 8 bits, where there is an instruction for that, not to 16.
  bool rounds_to_bytes;

  [[gnu::always_inline]] int num_queries(int sequence) const { return query_start[sequence + 1] - query_start[sequence]; }
  // The first key that the query at `position` sees.
  [[gnu::always_inline]] int first_key(int position) const { return window == 0 || position < window ? 0 : position - window + 1; }
};

// One layer's attention. Rows of queries and of the output are tokens, the heads of a token one after the other.
struct AttentionCall {
  const void* queries;
  void* output;
  int64_t query_stride;  // numbers from one token to the next
  int64_t output_stride;
  bool is_float32;  // queries and output; else bfloat16
  int32_t num_heads;
  float scale;    // of query · key, before the softmax
  float softcap;  // c: a score s becomes c · tanh(s / c); 0: none
  KVPlane keys;
  KVPlane values;

  [[gnu::always_inline]] int group_size() const { return num_heads / keys.num_kv_heads; }
};

// Some consecutive queries of one sequence, for some KV heads. Its rows are queries of one head each: KV head by KV head,
// of each query by query, of each the heads that share the KV head.
struct AttentionJob {
  int32_t sequence;
  int32_t first_head, num_heads;  // KV heads
  int32_t first_query;  // of the sequence's queries in this step
  int32_t num_queries;
  int32_t first_span, end_span;
  int32_t num_tasks;
  int32_t num_rows;
  int64_t partials;  // where its partial results begin, in rows; only of a job of several tasks
};

// Some spans of a job's keys.
struct AttentionTask {
  int32_t job;
  int32_t first_span, end_span;
};

// What a kernel is given for a task. next_task, next_job: what this thread will probably be given after it, or null: its
// first keys and values are ordered from memory while the last of this one are summed.
struct AttentionWork {
  const AttentionBatch& batch;
  const AttentionCall& call;
  const AttentionJob& job;
  const AttentionTask& task;
  std::atomic<int32_t>& pending;  // tasks of the job that are still to come: the last one merges
  float* scratch;                 // of this thread
  float* partials;                // of all jobs
  const AttentionTask* next_task;
  const AttentionJob* next_job;
};

using AttentionKernel = void (*)(const AttentionWork&);

// What the layers of a group share in one step.
class AttentionPlan {
 public:
  // Borrows what `batch` points to. What was built for the same heads stays.
  void start(const AttentionBatch& batch);
  // One layer, by the pool's threads.
  void attend(const AttentionCall& call);

 private:
  void build(int num_heads, int num_kv_heads, int num_threads);

  AttentionBatch batch_{};
  int num_heads_ = 0, num_kv_heads_ = 0;  // that it was built for; 0: it was not
  std::vector<AttentionJob> jobs_;
  std::vector<AttentionTask> tasks_;  // the largest first
  int64_t num_partials_ = 0;          // rows
  std::vector<float> partials_;
  std::unique_ptr<std::atomic<int32_t>[]> pending_;  // of each job, in the call that is running
  size_t pending_size_ = 0;
};

}  // namespace llmq
