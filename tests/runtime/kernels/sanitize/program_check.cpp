// A small decoder layer as a program over exactly sized memory: chunks, single tokens and a long context whose keys are
// split among threads, in every format of the store and every instruction set. One thread must make the same.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cpu.h"
#include "pool.h"
#include "program.h"

using namespace llmq;

namespace {

constexpr int kHeads = 6, kKVHeads = 2, kDim = 24, kBlockTokens = 16;
constexpr int kBefore[] = {0, 700, 33}, kNew[] = {37, 1, 5};
constexpr int kWidth = (kHeads + 2 * kKVHeads) * kDim;

std::mt19937 generator(0);

std::vector<uint16_t> random_bf16(size_t count) {
  std::vector<uint16_t> made(count);
  for (uint16_t& number : made) number = static_cast<uint16_t>(0x3e00 + generator() % 0x200 + (generator() % 2 << 15));
  return made;
}

std::vector<uint16_t> run(KVFormat format, int window, bool layer_norm) {
  generator.seed(1);
  const bool has_scales = format == KVFormat::int8 || format == KVFormat::fp8 || format == KVFormat::int4;
  KVPlane keys{nullptr, nullptr, 0, 1.0f, kKVHeads, kDim, format, KVOrder::by_unit};
  const int64_t payload = kBlockTokens * kKVHeads * keys.head_bytes(), scales = has_scales ? kBlockTokens * kKVHeads * 2 : 0;
  std::vector<int64_t> table, slot_block, slot_offset, positions, tokens;
  std::vector<int32_t> query_start{0}, lengths;
  int64_t num_blocks = 0;
  constexpr int kColumns = (700 + 1 + kBlockTokens - 1) / kBlockTokens;
  for (int sequence = 0; sequence < 3; sequence++) {
    const int length = kBefore[sequence] + kNew[sequence];
    for (int column = 0; column < kColumns; column++) {
      table.push_back(column * kBlockTokens < length ? num_blocks++ : num_blocks - 1);
    }
    for (int position = kBefore[sequence]; position < length; position++) {
      positions.push_back(position);
      slot_block.push_back(table[static_cast<size_t>(sequence * kColumns + position / kBlockTokens)]);
      slot_offset.push_back(position % kBlockTokens);
      tokens.push_back(static_cast<int64_t>(generator() % 10));
    }
    query_start.push_back(static_cast<int32_t>(positions.size()));
    lengths.push_back(length);
  }
  std::vector<uint8_t> blocks(static_cast<size_t>(num_blocks * 2 * (payload + scales)), 0x21);
  keys.block_stride = 2 * (payload + scales);
  KVPlane values = keys;
  values.order = KVOrder::by_head;
  keys.payload = blocks.data();
  values.payload = blocks.data() + payload + scales;
  if (has_scales) {
    keys.scales = reinterpret_cast<uint16_t*>(keys.payload + payload);
    values.scales = reinterpret_cast<uint16_t*>(values.payload + payload);
  }

  const std::vector<uint16_t> embedding = random_bf16(10 * kWidth);
  const std::vector<float> weight(kWidth, 1.5f), bias(kWidth, 0.25f), cos(701 * (kDim / 2), 0.6f), sin(701 * (kDim / 2), 0.8f);
  const Norm norm{layer_norm ? Norm::Kind::layer : Norm::Kind::rms, kWidth, 1e-5f, weight.data(), bias.data()};
  const Norm head_norm{Norm::Kind::rms, kDim, 1e-5f, weight.data(), nullptr};
  Program program;
  const int x = program.add_buffer(kWidth), qkv = program.add_buffer(kWidth), mixed = program.add_buffer(kHeads * kDim);
  const int active = program.add_buffer(kHeads * kDim / 2), result = program.add_buffer(kHeads * kDim / 2);
  program.add_embed(embedding.data(), kWidth, 2.0f, x);
  program.add_residual({kWidth, {}, {}, {}, 1.0f, norm, {}}, x, -1, qkv);
  program.add_qkv({{}, kHeads, kKVHeads, kDim, kDim, head_norm, head_norm, cos.data(), sin.data(), kDim / 2, nullptr,
                   nullptr, nullptr, keys, values}, 0, qkv);
  program.add_attention({nullptr, nullptr, 0, 0, false, kHeads, 0.2f, 0.0f, keys, values}, 0, qkv, mixed);
  program.add_activate(ActivationFunction::gelu, true, kHeads * kDim / 2, mixed, active);
  program.add_activate(ActivationFunction::silu, false, kHeads * kDim / 2, active, result);

  AttentionPlan plan;
  std::vector<uint16_t> out(positions.size() * kHeads * kDim / 2);
  for (int repetition = 0; repetition < 3; repetition++) {
    plan.start({3, query_start.data(), lengths.data(), table.data(), kColumns, kBlockTokens, window, false});
    program.run({static_cast<int64_t>(positions.size()), tokens.data(), positions.data(),
                 {{&plan, slot_block.data(), slot_offset.data()}}}, result, out.data());
  }
  return out;
}

}  // namespace

int main() {
  for (Isa one : {Isa::avx2, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx, Isa::amx_emulated}) {
    if (!runs_here(one)) continue;
    force_isa(one);
    for (int format = 0; format < 6; format++) {
      for (int window : {0, 50}) {
        thread_pool().resize(1);
        const auto alone = run(static_cast<KVFormat>(format), window, window == 0);
        thread_pool().resize(4);
        if (run(static_cast<KVFormat>(format), window, window == 0) != alone) {
          std::fprintf(stderr, "%s, format %d, window %d: threads change a result\n", name_of(one), format, window);
          return 1;
        }
      }
    }
  }
  return 0;
}
