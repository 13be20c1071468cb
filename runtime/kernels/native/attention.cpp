#include "attention.h"

#include <algorithm>

#include "kernels.h"
#include "pool.h"

namespace llmq {
namespace {

// Tasks for each thread where there are not enough jobs: more of them even out, fewer cost less merging.
constexpr int kTasksPerThread = 4;

int64_t work_of(const AttentionJob& job) { return int64_t{job.end_span - job.first_span} * job.num_rows; }

// As attention_kernel.cpp pads it at most.
int64_t padded_head_dim(int head_dim) { return (head_dim + 63) / 64 * 64; }

// What a task holds: see attention_kernel.cpp.
int64_t scratch_floats(const AttentionCall& call) {
  const int64_t dim_k = padded_head_dim(call.keys.head_dim), dim_v = padded_head_dim(call.values.head_dim);
  const int64_t rows = std::max(kMostRows, call.num_heads);
  const int64_t scores = 2 * kKeySpan * 16;  // and weights, of a few rows
  return kKeySpan * (dim_k + dim_v + 2) + rows * (dim_k + 2 * dim_v + 8) + scores + 16 * 16;
}

float* aligned(std::vector<float>& memory, int64_t floats) {
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(static_cast<size_t>(floats + 16));
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
}

}  // namespace

void AttentionPlan::start(const AttentionBatch& batch) {
  batch_ = batch;
  num_heads_ = num_kv_heads_ = 0;
}

void AttentionPlan::build(int num_heads, int num_kv_heads, int num_threads) {
  num_heads_ = num_heads;
  num_kv_heads_ = num_kv_heads;
  jobs_.clear();
  tasks_.clear();
  num_partials_ = 0;
  const int group_size = num_heads / num_kv_heads;
  const int queries_per_job = std::max(1, kMostRows / group_size);
  const auto for_queries = [&](auto&& body) {
    for (int sequence = 0; sequence < batch_.num_sequences; sequence++) {
      const int num_queries = batch_.num_queries(sequence), before = batch_.lengths[sequence] - num_queries;
      for (int first = 0; first < num_queries; first += queries_per_job) {
        const int count = std::min(queries_per_job, num_queries - first);
        body(sequence, first, count, batch_.first_key(before + first) / kKeySpan,
             (before + first + count - 1) / kKeySpan + 1);
      }
    }
  };
  int64_t num_spans = 0;
  for_queries([&](int, int, int, int first_span, int end_span) { num_spans += end_span - first_span; });
  // The heads of a key lie side by side: read by one thread, one after the other, they come at the memory's speed.
  const bool has_work_for_all = num_threads == 1 || num_spans >= int64_t{num_threads} * kTasksPerThread;
  int64_t total = 0;
  for_queries([&](int sequence, int first, int count, int first_span, int end_span) {
    const bool is_small = count * num_heads <= std::max(kMostRows, num_heads);
    const int heads = is_small && has_work_for_all ? num_kv_heads : 1;
    for (int head = 0; head < num_kv_heads; head += heads) {
      jobs_.push_back({sequence, head, heads, first, count, first_span, end_span, 1, heads * count * group_size, 0});
      total += work_of(jobs_.back());
    }
  });
  const int64_t share = num_threads == 1 ? total : total / (num_threads * kTasksPerThread) + 1;
  for (size_t index = 0; index < jobs_.size(); index++) {
    AttentionJob& job = jobs_[index];
    const int spans = job.end_span - job.first_span;
    job.num_tasks = static_cast<int>(std::min<int64_t>(spans, (work_of(job) + share - 1) / share));
    if (job.num_tasks > 1) {
      job.partials = num_partials_;
      num_partials_ += int64_t{spans} * job.num_rows;
    }
    for (int task = 0; task < job.num_tasks; task++) {
      tasks_.push_back({static_cast<int32_t>(index), job.first_span + spans * task / job.num_tasks,
                        job.first_span + spans * (task + 1) / job.num_tasks});
    }
  }
  const auto work = [this](const AttentionTask& task) {
    return int64_t{task.end_span - task.first_span} * jobs_[static_cast<size_t>(task.job)].num_rows;
  };
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [&](const AttentionTask& a, const AttentionTask& b) { return work(a) > work(b); });
  if (pending_size_ < jobs_.size()) {
    pending_size_ = 2 * jobs_.size();
    pending_ = std::make_unique<std::atomic<int32_t>[]>(pending_size_);
  }
}

void AttentionPlan::attend(const AttentionCall& call) {
  if (num_heads_ != call.num_heads || num_kv_heads_ != call.keys.num_kv_heads) {
    build(call.num_heads, call.keys.num_kv_heads, thread_pool().num_threads());
  }
  for (size_t index = 0; index < jobs_.size(); index++) {
    pending_[index].store(jobs_[index].num_tasks, std::memory_order_relaxed);
  }
  float* partials = aligned(partials_, num_partials_ * (padded_head_dim(call.values.head_dim) + 2));
  const AttentionKernel kernel = model_kernels().attend;
  const int64_t num_tasks = static_cast<int64_t>(tasks_.size());
  const int64_t num_threads = thread_pool().num_threads();
  thread_pool().parallel_for(num_tasks, 1, [&](int64_t begin, int64_t end, int) {
    thread_local std::vector<float> memory;
    float* scratch = aligned(memory, scratch_floats(call));
    for (int64_t index = begin; index < end; index++) {
      const AttentionTask& task = tasks_[static_cast<size_t>(index)];
      const auto job = static_cast<size_t>(task.job);
      const int64_t next = index + num_threads;
      const AttentionTask* next_task = next < num_tasks ? &tasks_[static_cast<size_t>(next)] : nullptr;
      const AttentionJob* next_job = next_task ? &jobs_[static_cast<size_t>(next_task->job)] : nullptr;
      kernel({batch_, call, jobs_[job], task, pending_[job], scratch, partials, next_task, next_job});
    }
  });
}

}  // namespace llmq
