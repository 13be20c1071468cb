"""Attention of one layer: projections, norms of q and k, rotation, and the store between them and the kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmq.profiles.architecture import AttentionLayer
from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.batch import BatchInputs
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.linear import Linear
from llmq.runtime.layers.norm import Norm
from llmq.runtime.layers.rope import RotaryEmbedding, apply_rope


@dataclass(frozen=True)
class Step:
    """What all layers share in one step."""

    inputs: BatchInputs
    store: KVStore
    attention: AttentionBackend
    prepared: Sequence[Any]  # of the attention backend, for each KV-cache group
    rotations: dict[RotaryEmbedding, tuple[Tensor, Tensor]]  # cos and sin of each token

    @classmethod
    def of(
        cls, inputs: BatchInputs, store: KVStore, attention: AttentionBackend, ropes: Sequence[RotaryEmbedding] = ()
    ) -> "Step":
        prepared = [attention.prepare(metadata) for metadata in inputs.attention]
        return cls(inputs, store, attention, prepared, {rope: rope.rows(inputs.positions) for rope in ropes})

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None) -> Tensor:
        """Write k and v [num_tokens, num_kv_heads, head_dim], then let q [num_tokens, num_heads, head_dim] see them."""
        group = self.inputs.group_of_layer[layer]
        # Written before they are read: attention sees the current chunk only as the store holds it, so that chunking
        # and prefix hits cannot change a result.
        self.store.write(layer, k, v, self.inputs.attention[group].slots)
        return self.attention(q, layer, self.store, self.prepared[group], scale, softcap)


@dataclass(frozen=True)
class AttentionSettings:
    """The numbers of one layer's attention."""

    layer: int
    num_heads: int
    shape: AttentionLayer
    scale: float
    softcap: float | None
    norm_whole: bool  # the norms of q and k are over the whole projection, not each head


class SelfAttention:
    """x [num_tokens, hidden_size] -> the same shape. `qkv` is q, k, v one after the other."""

    def __init__(
        self,
        settings: AttentionSettings,
        qkv: Linear,
        o: Linear,
        q_norm: Norm | None,
        k_norm: Norm | None,
        rope: RotaryEmbedding | None,
    ) -> None:
        self.settings = settings
        self.qkv, self.o = qkv, o
        self.q_norm, self.k_norm = q_norm, k_norm
        self.rope = rope
        self.linears = [qkv, o]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        settings = self.settings
        q, k, v = self.project(x)
        if self.rope is not None:
            cos, sin = step.rotations[self.rope]
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return self.o(step.attend(settings.layer, q, k, v, settings.scale, settings.softcap).flatten(1))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], normed, not rotated."""
        settings, shape = self.settings, self.settings.shape
        sizes = [
            settings.num_heads * shape.head_dim_k,
            shape.num_kv_heads * shape.head_dim_k,
            shape.num_kv_heads * shape.head_dim_v,
        ]
        q, k, v = self.qkv(x).split(sizes, dim=-1)
        if settings.norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (settings.num_heads, shape.head_dim_k))
        k = k.unflatten(-1, (shape.num_kv_heads, shape.head_dim_k))
        v = v.unflatten(-1, (shape.num_kv_heads, shape.head_dim_v))
        if self.q_norm is not None and not settings.norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v
