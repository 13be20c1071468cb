"""What a step of the engine computes with beside weights and KV-cache: activations (an estimate) and logits (exact)."""

from dataclasses import dataclass
from typing import Any

from llmq.profiles.architecture import ModelArchitecture

LOGIT_BYTES = 4  # float32, as the sampler reads them


@dataclass(frozen=True)
class StepMemory:
    """Of one rank. Activations: see `activation_bytes`; logits: [num_sequences, vocab_size] in float32, whole."""

    step_tokens: int
    num_sequences: int
    activation_bytes: int
    logits_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.activation_bytes + self.logits_bytes


def step_memory(
    architecture: ModelArchitecture,
    config: dict[str, Any],
    *,
    step_tokens: int,
    num_sequences: int,
    float_bytes: int,
    ranks: int = 1,
) -> StepMemory:
    """Of a step of `step_tokens` tokens that ends with a token for each of `num_sequences` sequences."""
    return StepMemory(
        step_tokens,
        num_sequences,
        activation_bytes(architecture, config, step_tokens, float_bytes, ranks),
        num_sequences * architecture.vocab_size * LOGIT_BYTES,
    )


def activation_bytes(
    architecture: ModelArchitecture, config: dict[str, Any], step_tokens: int, float_bytes: int, ranks: int = 1
) -> int:
    """Most that is alive at once in one layer, by its shapes: the residual stream, its norm, and the wider of attention
    (q, k, v and what comes out) and MLP (gate, up and their product).

    An estimate: kernels' workspaces and the allocator's rounding come on top, and fused kernels keep less.
    """
    layer = architecture.keys[0]
    query = architecture.num_attention_heads * layer.head_dim_k
    keys = max(layer.num_kv_heads // ranks, 1) * (layer.head_dim_k + layer.head_dim_v) * ranks
    wide = max(2 * query + keys, 3 * mlp_width(architecture, config))
    return step_tokens * float_bytes * (2 * architecture.hidden_size + -(-wide // ranks))


def mlp_width(architecture: ModelArchitecture, config: dict[str, Any]) -> int:
    """Features between the linears of the MLP that a token passes: of all its experts together where it has some."""
    config = {**config, **(config.get("text_config") or {})}
    expert = config.get("moe_intermediate_size")
    chosen = config.get("num_experts_per_tok") or config.get("num_experts_per_token") or 1
    dense = architecture.intermediate_size or 0
    return max(dense, expert * chosen) if isinstance(expert, int) and isinstance(chosen, int) else dense
