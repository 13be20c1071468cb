// A decoder as a list of operations over buffers of activations, run for all tokens of a step in one call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "row_kernels.h"

namespace llmq {

// A step for one KV-cache group.
struct StepGroup {
  AttentionPlan* plan;
  const int64_t* slot_block;  // [num_tokens]
  const int64_t* slot_offset;
};

struct Step {
  int64_t num_tokens;
  const int64_t* token_ids;  // [num_tokens]
  const int64_t* positions;
  std::vector<StepGroup> groups;
};

// Buffers are numbered in the order of add_buffer: bfloat16 [num_tokens, width], from one step to the next of no meaning.
// An operation reads and writes the buffers that it names. Weights, norms and the store are borrowed.
class Program {
 public:
  int add_buffer(int64_t width);

  void add_embed(const uint16_t* embedding, int64_t size, float scale, int out);
  // To columns of `out` from `column` on.
  void add_linear(const PackedWeight* weight, Activations activations, int in, int out, int64_t column);
  // `call` without its rows: x += scale · after(y), out = before(x); y, out: -1 for none.
  void add_residual(const ResidualCall& call, int x, int y, int out);
  void add_activate(ActivationFunction function, bool gated, int64_t size, int in, int out);
  // `logits`: of the router.
  void add_experts(Experts experts, int in, int logits, int out);
  // `call` without its rows, positions and slots.
  void add_qkv(const QkvCall& call, int group, int qkv);
  // `call` without queries and output: they lie at the start of the rows of `qkv`.
  void add_attention(const AttentionCall& call, int group, int qkv, int out);

  // Since start_timing, of each operation the run that was fastest, in the order in which they were added: other work
  // on the machine falls on some runs only. A clock is read between operations.
  struct Time { std::string operation; double seconds; };
  void start_timing();
  std::vector<Time> times() const;

  // `out`: bfloat16 [num_tokens, width of `result`], what the buffer `result` holds at the end.
  void run(const Step& step, int result, uint16_t* out);

 private:
  struct Embed { EmbedCall call; int out; };
  struct Linear { const PackedWeight* weight; Activations activations; int in, out; int64_t column; };
  struct Residual { ResidualCall call; int x, y, out; };
  struct Activate { ActivateCall call; int in, out; };
  struct Mixture { std::shared_ptr<Experts> experts; int in, logits, out; };
  struct Qkv { QkvCall call; int group, qkv; };
  struct Attention { AttentionCall call; int group, qkv, out; };
  using Operation = std::variant<Embed, Linear, Residual, Activate, Mixture, Qkv, Attention>;
  struct Free { void operator()(void* memory) const { std::free(memory); } };

  static std::string name_of(const Embed&) { return "embed"; }
  static std::string name_of(const Linear& operation);
  static std::string name_of(const Residual&) { return "residual, norm"; }
  static std::string name_of(const Activate&) { return "activation"; }
  static std::string name_of(const Mixture&) { return "experts"; }
  static std::string name_of(const Qkv&) { return "norm, rotate, write K and V"; }
  static std::string name_of(const Attention&) { return "attention"; }

  void reserve(int64_t num_tokens);
  Rows rows(int buffer) const;
  void run(Embed operation, const Step& step) const;
  void run(const Linear& operation, const Step& step) const;
  void run(Residual operation, const Step& step) const;
  void run(Activate operation, const Step& step) const;
  void run(const Mixture& operation, const Step& step) const;
  void run(Qkv operation, const Step& step) const;
  void run(Attention operation, const Step& step) const;

  std::vector<int64_t> widths_;
  std::vector<Operation> operations_;
  std::unique_ptr<uint16_t, Free> memory_;
  std::vector<int64_t> offsets_;  // of the buffers in it
  int64_t capacity_ = 0;          // tokens
  int result_ = -1;               // the buffer that is the caller's own memory, in the run that goes on
  uint16_t* out_ = nullptr;
  std::vector<double> seconds_;  // of each operation, the least; empty: not timed
};

}  // namespace llmq
