"""The decoder: one forward for every family in `families.py`."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from llmq.profiles.architecture import ModelArchitecture
from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.batch import BatchInputs
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.linear import Linear
from llmq.runtime.layers.rope import RotaryEmbedding, apply_rope


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer, siblings merged: `qkv` is q, k, v one after the other, `gate_up` gate, then up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Token ids and positions of a step -> hidden states, reading and writing the KVStore on the way."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        head: Linear,
        rope: RotaryEmbedding,
        rms_norm_eps: float,
    ) -> None:
        self.architecture = architecture
        self.embedding = embedding  # [vocab_size, hidden_size]
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.rope = rope
        self.rms_norm_eps = rms_norm_eps

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in memory; a tied head counts once."""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        if getattr(self.head, "weight", None) is not self.embedding:
            linears.append(self.head)
        return self.embedding.nbytes + sum(linear.num_bytes for linear in linears)

    def forward(self, inputs: BatchInputs, store: KVStore, attention: AttentionBackend) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of all positions of the step, after the final norm."""
        hidden = self.embedding[inputs.token_ids]
        cos, sin = self.rope.rows(inputs.positions)
        prepared = [attention.prepare(metadata) for metadata in inputs.attention]
        for index, layer in enumerate(self.layers):
            group = inputs.group_of_layer[index]
            normed = self._norm(hidden, layer.input_norm)
            q, k, v = self._qkv(layer, index, normed, cos, sin)
            # Written before they are read: attention sees the current chunk only as the store holds it, so that
            # chunking and prefix hits cannot change a result.
            store.write(index, k, v, inputs.attention[group].slots)
            mixed = attention(q, index, store, prepared[group], q.shape[-1] ** -0.5)
            hidden = hidden + layer.o(mixed.flatten(1))
            gate, up = layer.gate_up(self._norm(hidden, layer.post_attention_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return self._norm(hidden, self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        return self.head(hidden).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.rms_norm_eps)

    def _qkv(
        self, layer: DecoderLayer, index: int, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], q and k rotated."""
        spec, num_heads = self.architecture.attention[index], self.architecture.num_attention_heads
        sizes = [num_heads * spec.head_dim_k, spec.num_kv_heads * spec.head_dim_k, spec.num_kv_heads * spec.head_dim_v]
        q, k, v = layer.qkv(x).split(sizes, dim=-1)
        q = q.unflatten(-1, (num_heads, spec.head_dim_k))
        k = k.unflatten(-1, (spec.num_kv_heads, spec.head_dim_k))
        v = v.unflatten(-1, (spec.num_kv_heads, spec.head_dim_v))
        if layer.q_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v
