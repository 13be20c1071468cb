"""The floor of a step: what it must read and compute, over what a machine can.

Williams et al., "Roofline" (CACM 2009): no step is faster than max(bytes / bandwidth, FLOPs / peak). Decoding reads all
weights and every sequence's K and V for one token each; a prefill multiplies every weight with every token.
"""

from dataclasses import dataclass
from typing import Any

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.weight_size import experts_of, linear_shapes, other_parameters

_MOST_BATCH = 1 << 16


@dataclass(frozen=True)
class Machine:
    """What one rank can move and compute at most, and where the numbers are from."""

    name: str
    bandwidth_bytes_per_s: float
    flops_per_s: float  # dense, in the format of the products; 2 for a multiply-add
    how: str
    link_bytes_per_s: float | None = None  # to the other ranks, in one direction; None: not known
    computes_in_4_bits: bool = False


@dataclass(frozen=True)
class StepWork:
    """What one step moves and computes on one rank."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    num_tokens: int = 1
    expert_flops: float = 0.0  # of `flops`, those in routed experts
    expert_passes: float = 0.0  # of one token through one expert of one layer

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    def memory_s(self, machine: Machine) -> float:
        return self.num_bytes / machine.bandwidth_bytes_per_s

    def compute_s(self, machine: Machine) -> float:
        return self.flops / machine.flops_per_s

    def floor_s(self, machine: Machine) -> float:
        return max(self.memory_s(machine), self.compute_s(machine))

    def is_compute_bound(self, machine: Machine) -> bool:
        return self.compute_s(machine) >= self.memory_s(machine)


@dataclass(frozen=True)
class DecoderWork:
    """A decoder's bytes and multiplications, from which those of any step follow. Evenly split over `ranks`, what they
    say to each other not counted."""

    architecture: ModelArchitecture
    layout: KVCacheLayout  # of one rank
    ranks: int
    dense_bytes: float  # of all ranks: read in every step. Without an embedding of which only rows are read
    expert_bytes: float  # of all routed experts together
    dense_parameters: int  # multiplied with every token; the head is apart
    expert_parameters: int
    head_parameters: int  # multiplied with the tokens whose logits are wanted
    num_experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], layout: KVCacheLayout, weight_bytes: int, ranks: int = 1) -> "DecoderWork":
        """`weight_bytes`: of the whole model as it is held, experts in the same format as the other linears, what is no
        linear in 16 bit. Raises InputError for an architecture whose linears are not known."""
        arch, shapes, experts = ModelArchitecture.from_config(config), linear_shapes(config), experts_of(config)
        linears = sum(one.out_features * one.in_features * one.count for one in shapes)
        routed = sum(one.out_features * one.in_features * one.count for one in shapes if one.is_expert)
        table = arch.vocab_size * arch.hidden_size
        held_beside = 2 * other_parameters(config)
        expert_bytes = max(0, weight_bytes - held_beside) * routed / linears
        unread = 0 if arch.tie_word_embeddings else 2 * table
        return cls(
            architecture=arch,
            layout=layout,
            ranks=ranks,
            dense_bytes=weight_bytes - expert_bytes - unread,
            expert_bytes=expert_bytes,
            dense_parameters=linears - routed,
            expert_parameters=routed,
            head_parameters=table,
            num_experts=experts.count if experts else 0,
            experts_per_token=experts.per_token if experts else 0,
            expert_layers=max((one.count for one in shapes if one.is_expert), default=0) // experts.count
            if experts
            else 0,
        )

    def decode(self, batch: int, context: int) -> StepWork:
        """One token for each of `batch` sequences, which then have `context` tokens each."""
        attention = self._attended(context)
        return StepWork(
            weight_bytes=self._weights_read(batch),
            kv_bytes=batch * (self.layout.needed_bytes(context) + self.layout.state_bytes),
            flops=2 * batch * (self._parameters_per_token + self.head_parameters + attention) / self.ranks,
            **self._in_experts(batch),
        )

    def prefill(self, num_tokens: int) -> StepWork:
        """All tokens of one prompt at once, the logits of the last: K and V are written once."""
        return StepWork(
            weight_bytes=self._weights_read(num_tokens),
            kv_bytes=self.layout.needed_bytes(num_tokens) + self.layout.state_bytes,
            flops=self.request_flops(num_tokens, 1) / self.ranks,
            **self._in_experts(num_tokens),
        )

    def request_flops(self, num_prompt: int, num_output: int, num_cached: int = 0) -> float:
        """Of a whole request on all ranks: every prompt token that was not cached, every output token but the last,
        which is not read any more, and the logits of all output tokens."""
        last = num_prompt + num_output - 1
        attention = self._attention(last) - self._attention(num_cached)
        return 2 * ((last - num_cached) * self._parameters_per_token + num_output * self.head_parameters + attention)

    def compute_bound_batch(self, machine: Machine, context: int) -> int | None:
        """The smallest batch whose decode step is bound by arithmetic; None: reading K and V takes longer in any."""
        if not self.decode(_MOST_BATCH, context).is_compute_bound(machine):
            return None
        low, high = 0, _MOST_BATCH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.decode(middle, context).is_compute_bound(machine) else (middle, high)
        return high

    def experts_read(self, num_tokens: int) -> float:
        """Expected share of experts that some of the tokens is sent to, by a router that prefers none:
        1 - (1 - k / E) ^ tokens."""
        return 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens if self.num_experts else 0.0

    def _weights_read(self, num_tokens: int) -> float:
        return (self.dense_bytes + self.expert_bytes * self.experts_read(num_tokens)) / self.ranks

    def _in_experts(self, num_tokens: int) -> dict[str, Any]:
        return {
            "num_tokens": num_tokens,
            "expert_flops": 2 * num_tokens * self._expert_parameters_per_token / self.ranks,
            "expert_passes": num_tokens * self.expert_layers * self.experts_per_token / self.ranks,
        }

    @property
    def _expert_parameters_per_token(self) -> float:
        return self.expert_parameters * self.experts_per_token / self.num_experts if self.num_experts else 0.0

    @property
    def _parameters_per_token(self) -> float:
        return self.dense_parameters + self._expert_parameters_per_token

    def _attention(self, num_tokens: int) -> int:
        """Multiply-adds of the first `num_tokens` queries: the i-th sees i tokens, or its layer's window."""
        total = 0
        for per_token, window in self.attention_layers:
            inside = min(num_tokens, window or num_tokens)
            total += per_token * (inside * (inside + 1) // 2 + (num_tokens - inside) * (window or 0))
        return total

    def _attended(self, context: int) -> int:
        """Multiply-adds of one query that sees `context` tokens."""
        return sum(per_token * min(context, window or context) for per_token, window in self.attention_layers)

    @property
    def attention_layers(self) -> list[tuple[int, int | None]]:
        """For each layer (multiply-adds of a query and one token that it sees: q·k and the sum over v, window)."""
        heads = self.architecture.num_attention_heads
        # A latent is its own value, all but its rope part.
        return [
            (heads * (layer.head_dim_k + (layer.head_dim_v or layer.head_dim_k)), layer.window)
            for layer in self.architecture.keys
        ]
