"""Who fits: the memory of one rank, its share of the weights, and the KV blocks that the rest holds."""

from dataclasses import dataclass, replace

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.step_memory import StepMemory
from llmq.profiles.weight_size import WeightSize


@dataclass(frozen=True)
class Memory:
    """Where the blocks of one rank live, and how much of it they get."""

    name: str
    num_bytes: int
    kv_cache_bytes: int  # negative when the weights alone do not fit
    holds_weights: bool = True


def whole_memory(name: str, num_bytes: int, weight_bytes: int) -> Memory:
    """`num_bytes` of which weights and blocks may take all. `weight_bytes`: of one rank."""
    return Memory(name, num_bytes, num_bytes - weight_bytes)


def gpu_memory(name: str, num_bytes: int, utilization: float, weight_bytes: int) -> Memory:
    """A GPU of which weights and blocks may take the share `utilization`, as in `llmq serve`."""
    return Memory(name, num_bytes, int(num_bytes * utilization) - weight_bytes)


def shared_memory(name: str, num_bytes: int, share: float, weight_bytes: int, ranks: int = 1) -> Memory:
    """A machine's RAM: blocks of all ranks take `share` of what all weights leave free."""
    spare = num_bytes - weight_bytes
    return Memory(name, num_bytes, int(spare * share) // ranks if spare > 0 else spare)


def kv_cache_memory(num_bytes: int) -> Memory:
    """Memory for blocks alone."""
    return Memory("memory for KV blocks", num_bytes, num_bytes, holds_weights=False)


@dataclass(frozen=True)
class StageBudget:
    """What a rank of a pipeline's stage holds: of layers [layers[0], layers[1]), and of what lies before the first of
    all or behind the last."""

    layers: tuple[int, int]
    layout: KVCacheLayout
    weight_bytes: int  # 0: not known


@dataclass(frozen=True)
class Budget:
    """What sequences of `num_tokens` tokens take, and how many a memory holds.

    `step_tokens`: tokens of one sequence that a step computes at most, which a window layer holds beyond its window.
    """

    architecture: ModelArchitecture
    layout: KVCacheLayout  # of one rank
    ranks: int
    num_tokens: int
    weights: WeightSize | None  # of all ranks together; None: not known, and not asked for
    step_tokens: int
    memory: Memory | None = None
    most_blocks: int | None = None  # that the runtime takes of it, however much there is; None: all
    step: StepMemory | None = None  # what a step computes with, beside weights and blocks
    stages: tuple[StageBudget, ...] = ()  # of a pipeline
    stage: int = 0  # the one with room for the fewest blocks, whose `architecture`, `layout` and `memory` these are
    valid_ranks: tuple[int, ...] = (1,)  # that the model can be split into
    drafter_layers: int = 0  # the last ones of `architecture`: of a model that guesses for it

    @property
    def rank_weight_bytes(self) -> int:
        """Evenly split, 0 where it is not known. What ranks hold twice (norms, a KV head that several share) is below a
        thousandth."""
        if self.stages:
            return self.stages[self.stage].weight_bytes
        return -(-self.weights.num_bytes // self.ranks) if self.weights else 0

    @property
    def num_ranks(self) -> int:
        """Of all stages."""
        return self.ranks * max(1, len(self.stages))

    @property
    def bytes_per_token(self) -> int:
        """On all ranks."""
        return self.ranks * sum(one.bytes_per_token for one in self._layouts)

    def needed_bytes(self, num_tokens: int) -> int:
        """What the mathematics needs for a sequence's tokens on all ranks, beside its state."""
        return self.ranks * sum(one.needed_bytes(num_tokens) for one in self._layouts)

    @property
    def _layouts(self) -> list[KVCacheLayout]:
        return [stage.layout for stage in self.stages] or [self.layout]

    @property
    def margin_bytes(self) -> int | None:
        """What the memory keeps for neither weights nor blocks; None where it is for blocks alone."""
        if self.memory is None or not self.memory.holds_weights:
            return None
        return self.memory.num_bytes - self.memory.kv_cache_bytes - self.rank_weight_bytes

    @property
    def sequence_bytes(self) -> int:
        """What the mathematics needs for one sequence on one rank, its state too, no block rounded up."""
        return self.layout.needed_bytes(self.num_tokens) + self.layout.state_bytes

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds for one sequence on one rank, in whole blocks, and its state."""
        return self.layout.reserved_bytes(self.num_tokens, self.step_tokens) + self.layout.state_bytes

    @property
    def uniform_bytes(self) -> int:
        """One sequence if every layer kept every token: the estimate that overlooks windows."""
        return self.layout.bytes_per_token * self.num_tokens + self.layout.state_bytes

    @property
    def drafter_bytes_per_token(self) -> int:
        first = len(self.architecture.attention) - self.drafter_layers
        return sum(
            group.spec.bytes_per_token * sum(layer >= first for layer in group.layers) for group in self.layout.groups
        )

    def without_gqa_bytes(self) -> int | None:
        """One sequence on all ranks if each attention head had a K and V of its own; None where a layer keeps a latent
        in place of heads, or is a drafter's."""
        heads = self.architecture.num_attention_heads
        if self.drafter_layers or not all(layer.head_dim_v for layer in self.architecture.keys):
            return None
        layers = tuple(layer and replace(layer, num_kv_heads=heads) for layer in self.architecture.attention)
        spec = self.layout.groups[0].spec
        layout = KVCacheLayout.of(
            replace(self.architecture, attention=layers), spec.dtype.name, dynamic_scales=spec.dtype.scale_bytes > 0
        )
        return layout.needed_bytes(self.num_tokens) + layout.state_bytes

    def blocks_beside(self, num_sequences: int) -> int:
        """Blocks that the memory holds beside the states of so many sequences."""
        states = num_sequences * self.layout.state_bytes
        fitting = max(0, self.layout.num_blocks(self.memory.kv_cache_bytes - states))
        return fitting if self.most_blocks is None else min(fitting, self.most_blocks)

    @property
    def num_blocks(self) -> int:
        """What the runtime allocates in the memory that is left, beside the states of all sequences that fit."""
        return 0 if self.memory is None else self.blocks_beside(max(1, self.num_sequences))

    @property
    def num_sequences(self) -> int:
        """Sequences of `num_tokens` tokens held at the same time, none sharing a block."""
        if self.memory is None:
            return 0
        blocks = self.layout.blocks_for(self.num_tokens, self.step_tokens)
        if not self.layout.state_bytes:
            return self.blocks_beside(0) // blocks
        return max(0, self.memory.kv_cache_bytes) // (blocks * self.layout.block_bytes + self.layout.state_bytes)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that all blocks hold: their whole capacity where no layer has a window."""
        blocks = 0 if self.memory is None else self.blocks_beside(1)
        most = blocks * max(group.block_tokens for group in self.layout.groups)
        return self.layout.longest_sequence(blocks, most, self.step_tokens)
