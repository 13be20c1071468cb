"""How many KV blocks an engine gets, from the specs that `kv-budget` prints by. No torch: also asked before a start."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.modules import modules_of
from llmq.profiles.units import format_bytes
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes, NativeNumerics
from llmq.runtime.parallel.stage_plan import Stage, whole

# Of the memory that is free once the weights are in: a machine without a GPU is rarely only a server.
CPU_SHARE = 0.3
# Of a whole GPU, weights and what a step computes included; the rest is for whoever else is on it.
GPU_SHARE = 0.9


@dataclass(frozen=True)
class KVCachePlan:
    layout: KVCacheLayout
    num_blocks: int
    max_model_len: int

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


class MemoryProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of a rank's GPU goes, as measured in the largest step: see `memory_profile`."""

    total_bytes: int
    share: float  # of them, that the engine may take
    weight_bytes: int  # in torch's tensors once the model is loaded
    graph_bytes: int  # CUDA graphs' pools and buffers
    step_bytes: int  # the step's own tensors at their peak
    slack_bytes: int  # that torch's allocator held beside them, in pieces that nothing fitted
    outside_bytes: int  # not torch's: the CUDA context, libraries, NCCL, and other processes on the device
    planned_weight_bytes: int  # what `kv-budget` takes the weights for; it knows of nothing else

    @property
    def spare_bytes(self) -> int:
        """For KV blocks."""
        taken = self.weight_bytes + self.graph_bytes + self.step_bytes + self.slack_bytes + self.outside_bytes
        return max(0, int(self.total_bytes * self.share) - taken)

    @property
    def planned_bytes(self) -> int:
        """For KV blocks by the planner's arithmetic."""
        return max(0, int(self.total_bytes * self.share) - self.planned_weight_bytes)

    def __str__(self) -> str:
        parts = (
            ("weights", self.weight_bytes),
            ("the largest step", self.step_bytes),
            ("allocator slack", self.slack_bytes),
            ("CUDA graphs", self.graph_bytes),
            ("outside of torch", self.outside_bytes),
        )
        listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts if count)
        return (
            f"measured of {self.share:g} × {format_bytes(self.total_bytes)}: {listed}; {format_bytes(self.spare_bytes)}"
            f" are left for the KV-cache (kv-budget: {format_bytes(self.planned_bytes)})"
        )


def weight_bytes(checkpoint: Checkpoint, dtypes: Dtypes, numerics: NativeNumerics | None) -> int:
    """Of all weights as an engine holds them: as stored, floats in the dtype of the activations. Native kernels have a
    float head in an order of their own: a tied one beside the embedding's rows, another one instead of them; and they
    hold integers in 3, 4 or 8 bits."""
    held, architecture = checkpoint.held_bytes(dtypes.float_bytes), checkpoint.architecture
    if numerics is not None and dtypes.dtype == "bf16" and architecture.family is not None:
        held += _widened_bytes(checkpoint)
    packed = packed_head_bytes(checkpoint, dtypes, numerics)
    if packed is None:
        return held
    replaced = 0 if architecture.tie_word_embeddings else architecture.vocab_size * architecture.hidden_size * 2
    return held + packed - replaced


def _widened_bytes(checkpoint: Checkpoint) -> int:
    """What integers of other than 3, 4 or 8 bits take on top of their own in kernels that have only those, and zero
    points in fewer than the 8 that they have there."""
    total = 0
    for module in modules_of(checkpoint.tensors.values(), checkpoint.quantization):
        match = re.match(r"int(\d)\b", module.layout)
        if match and module.is_quantized:
            bits = int(match.group(1))
            total += module.num_weights * (next(held for held in (3, 4, 8) if bits <= held) - bits) // 8
            zeros = module.tensors.get("weight_zero_point")
            if zeros is not None and zeros.dtype == "I32":
                total += zeros.num_bytes * (8 - bits) // bits
    return total


def packed_head_bytes(checkpoint: Checkpoint, dtypes: Dtypes, numerics: NativeNumerics | None) -> int | None:
    """Of a head stored as floats, in the order of native kernels (`packed_weight.h`); None: it has none."""
    architecture = checkpoint.architecture
    if numerics is None or dtypes.dtype != "bf16" or architecture.family is None or not checkpoint.has_float_head:
        return None
    rows = -(-architecture.vocab_size // 16) * 16
    columns = -(-architecture.hidden_size // 8) * 8
    if not numerics.int8_head:
        return rows * columns * 2
    group_size = numerics.head_group_size(columns)
    return rows * (columns + 4 if group_size is None else columns + columns // group_size * 2)


def with_drafter_layers(architecture: ModelArchitecture, drafter: ModelArchitecture | None) -> ModelArchitecture:
    """What a KV-cache keeps: the layers of a model, and behind them those of the model that guesses for it."""
    if drafter is None:
        return architecture
    return replace(architecture, attention=(*architecture.attention, *drafter.attention))


def rank_layout(
    architecture: ModelArchitecture, config: EngineConfig, dtypes: Dtypes, stage: Stage | None = None
) -> KVCacheLayout:
    """Of the KV-cache on each rank, or on each of a stage."""
    layout = KVCacheLayout.of(
        architecture,
        dtypes.kv_dtype,
        block_tokens=config.block_tokens,
        tensor_parallel=config.tensor_parallel,
        dynamic_scales=not dtypes.has_static_kv_scales,
    )
    return layout if stage is None or stage.num_stages == 1 else layout.of_layers(*stage.layers)


def fullest_layout(
    architecture: ModelArchitecture, config: EngineConfig, dtypes: Dtypes, stages: Sequence[Stage]
) -> KVCacheLayout:
    """Of the stage whose blocks are the largest: who holds them holds as many of any other's."""
    layouts = [rank_layout(architecture, config, dtypes, stage) for stage in stages]
    return max(layouts, key=lambda layout: layout.block_bytes)


def plan_kv_cache(
    architecture: ModelArchitecture,
    config: EngineConfig,
    dtypes: Dtypes,
    available_bytes: int,
    stages: Sequence[Stage] = (),
) -> KVCachePlan:
    """Blocks and longest request of an engine; of several ranks each has the same blocks, with its own heads in them,
    and of its own layers where there are `stages`.

    `available_bytes` is what the KV-cache of a rank may take where `--kv-cache-memory` does not say, of the stage whose
    blocks are the largest. Without
    `--max-model-len` the longest request is what fits, up to the model's own context. Raises InputError where one
    request cannot fit, with what it needs, what there is, and what would work.
    """
    layout = fullest_layout(architecture, config, dtypes, stages or [whole(architecture.num_layers)])
    context, step_tokens = architecture.max_position_embeddings, config.max_num_batched_tokens
    if config.max_model_len is not None and not 1 <= config.max_model_len <= context:
        raise InputError(f"--max-model-len {config.max_model_len}: this model's context is 1 to {context} tokens")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise InputError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than --max-num-seqs "
            f"{config.max_num_seqs}: each running request needs one token of every step"
        )
    wanted = config.max_model_len or context
    if config.kv_cache_memory_bytes is not None:
        num_blocks = layout.num_blocks(config.kv_cache_memory_bytes)
    else:
        num_blocks = min(layout.num_blocks(max(0, available_bytes)), most_blocks(layout, config, wanted))
    longest = layout.longest_sequence(num_blocks, wanted, step_tokens)
    if longest < (config.max_model_len or 1):
        raise InputError(_does_not_fit(layout, wanted, num_blocks, longest, dtypes.kv_dtype, step_tokens))
    return KVCachePlan(layout, num_blocks, min(wanted, longest))


def most_blocks(layout: KVCacheLayout, config: EngineConfig, longest: int) -> int:
    """What an engine takes at most where it may choose: every sequence at its full length, and more is never used."""
    return config.max_num_seqs * layout.blocks_for(longest, config.max_num_batched_tokens)


def _does_not_fit(
    layout: KVCacheLayout, wanted: int, num_blocks: int, longest: int, kv_dtype: str, step_tokens: int
) -> str:
    needed, has = layout.reserved_bytes(wanted, step_tokens), num_blocks * layout.block_bytes
    remedies = [
        f"--kv-cache-memory {-(-needed // 2**20)}MiB or more",
        f"--max-model-len {longest} or less (or auto)" if longest else "",
        "--kv-dtype int8 or fp8 (about half the bytes of bf16)" if kv_dtype in ("fp32", "bf16", "fp16") else "",
    ]
    return (
        f"the KV-cache cannot hold one request of {wanted} tokens: it needs {format_bytes(needed)}, "
        f"there are {format_bytes(has)} ({num_blocks} blocks), the longest that fits is {longest} tokens. "
        f"Use {', or '.join(remedy for remedy in remedies if remedy)}"
    )
