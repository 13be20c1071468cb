#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <new>

#include "kernels.h"
#include "pool.h"

namespace llmq {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLine = 32;  // numbers in a cache line
// Numbers that a thread takes at a time of what needs a few instructions each: fewer are done before another is awake.
constexpr int64_t kNumbersPerTask = 8192;

// An odd number of lines: rows one below the other fall into different sets of the first-level cache.
int64_t padded(int64_t width) { return ((width + kLine - 1) / kLine | 1) * kLine; }

template <class Call>
void for_rows(void (*kernel)(const Call&, int64_t, int64_t), const Call& call, int64_t num_rows, int64_t width) {
  const int64_t grain = std::max<int64_t>(1, kNumbersPerTask / width);
  thread_pool().parallel_for(num_rows, grain, [&](int64_t begin, int64_t end, int) { kernel(call, begin, end); });
}

}  // namespace

int Program::add_buffer(int64_t width) {
  widths_.push_back(width);
  capacity_ = 0;
  return static_cast<int>(widths_.size()) - 1;
}

void Program::add_embed(const uint16_t* embedding, int64_t size, float scale, int out) {
  operations_.push_back(Embed{{embedding, nullptr, size, scale, {}}, out});
}

void Program::add_linear(const PackedWeight* weight, Activations activations, int in, int out, int64_t column) {
  operations_.push_back(Linear{weight, activations, in, out, column});
}

void Program::add_residual(const ResidualCall& call, int x, int y, int out) {
  operations_.push_back(Residual{call, x, y, out});
}

void Program::add_activate(ActivationFunction function, bool gated, int64_t size, int in, int out) {
  operations_.push_back(Activate{{function, gated, size, {}, {}}, in, out});
}

void Program::add_experts(Experts experts, int in, int logits, int out) {
  operations_.push_back(Mixture{std::make_shared<Experts>(std::move(experts)), in, logits, out});
}

void Program::add_qkv(const QkvCall& call, int group, int qkv) { operations_.push_back(Qkv{call, group, qkv}); }

void Program::add_attention(const AttentionCall& call, int group, int qkv, int out) {
  operations_.push_back(Attention{call, group, qkv, out});
}

void Program::run(const Step& step, int result, uint16_t* out) {
  reserve(step.num_tokens);
  result_ = result;
  out_ = out;
  auto before = seconds_.empty() ? Clock::time_point{} : Clock::now();
  for (size_t index = 0; index < operations_.size(); index++) {
    std::visit([&](const auto& one) { run(one, step); }, operations_[index]);
    if (seconds_.empty()) continue;
    const auto after = Clock::now();
    seconds_[index] = std::min(seconds_[index], std::chrono::duration<double>(after - before).count());
    before = after;
  }
}

void Program::start_timing() { seconds_.assign(operations_.size(), HUGE_VAL); }

std::vector<Program::Time> Program::times() const {
  std::vector<Time> result;
  for (size_t index = 0; index < seconds_.size(); index++) {
    result.push_back({std::visit([](const auto& one) { return name_of(one); }, operations_[index]), seconds_[index]});
  }
  return result;
}

std::string Program::name_of(const Linear& operation) {
  const PackedWeight& weight = *operation.weight;
  return "linear " + std::to_string(weight.out_features) + "x" + std::to_string(weight.in_features);
}

void Program::reserve(int64_t num_tokens) {
  if (num_tokens <= capacity_) return;
  offsets_.clear();
  int64_t size = 0;
  for (const int64_t width : widths_) {
    offsets_.push_back(size);
    size += padded(width) * num_tokens;
  }
  memory_.reset();
  memory_.reset(static_cast<uint16_t*>(std::aligned_alloc(64, static_cast<size_t>(size) * sizeof(uint16_t))));
  if (!memory_) throw std::bad_alloc();
  capacity_ = num_tokens;
}

Rows Program::rows(int buffer) const {
  if (buffer < 0) return {};
  const auto index = static_cast<size_t>(buffer);
  if (buffer == result_) return {out_, widths_[index]};
  return {memory_.get() + offsets_[index], padded(widths_[index])};
}

void Program::run(Embed operation, const Step& step) const {
  operation.call.token_ids = step.token_ids;
  operation.call.out = rows(operation.out);
  for_rows(model_kernels().embed, operation.call, step.num_tokens, operation.call.size);
}

void Program::run(const Linear& operation, const Step& step) const {
  const Rows in = rows(operation.in), out = rows(operation.out);
  linear(*operation.weight, operation.activations, in.data, step.num_tokens, in.stride, out.data + operation.column,
         out.stride, Output::bf16);
}

void Program::run(Residual operation, const Step& step) const {
  operation.call.x = rows(operation.x);
  operation.call.y = rows(operation.y);
  operation.call.out = rows(operation.out);
  for_rows(model_kernels().residual, operation.call, step.num_tokens, operation.call.size);
}

void Program::run(Activate operation, const Step& step) const {
  operation.call.in = rows(operation.in);
  operation.call.out = rows(operation.out);
  for_rows(model_kernels().activate, operation.call, step.num_tokens, 2 * operation.call.size);
}

void Program::run(const Mixture& operation, const Step& step) const {
  operation.experts->run(rows(operation.in), rows(operation.logits), step.num_tokens, rows(operation.out));
}

void Program::run(Qkv operation, const Step& step) const {
  QkvCall& call = operation.call;
  const StepGroup& group = step.groups[static_cast<size_t>(operation.group)];
  call.qkv = rows(operation.qkv);
  call.positions = step.positions;
  call.slot_block = group.slot_block;
  call.slot_offset = group.slot_offset;
  for_rows(model_kernels().prepare_qkv, call, step.num_tokens, widths_[static_cast<size_t>(operation.qkv)]);
}

void Program::run(Attention operation, const Step& step) const {
  AttentionCall& call = operation.call;
  const Rows qkv = rows(operation.qkv), out = rows(operation.out);
  call.queries = qkv.data;
  call.query_stride = qkv.stride;
  call.output = out.data;
  call.output_stride = out.stride;
  step.groups[static_cast<size_t>(operation.group)].plan->attend(call);
}

}  // namespace llmq
