"""What one decoder layer keeps of a sequence: K and V of its tokens, or a state of constant size."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionLayer:
    """The KV-cache of one layer: K is [num_kv_heads, head_dim_k] a token, V is [num_kv_heads, head_dim_v].

    Latent attention (MLA) is one head whose K is latent and rope part together and whose V, a part of K, takes nothing.
    """

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None  # tokens a query sees, itself included; None: all
    chunked: bool = False  # `window` is a chunk: a query sees from the last multiple of it on
    index_bytes: int = 0  # a token, beside K and V: what a sparse-attention indexer keeps, whole on each rank

    @property
    def kind(self) -> str:
        if not self.head_dim_v:
            return "latent attention"
        if self.window is None:
            return "full attention"
        return f"{'chunks' if self.chunked else 'window'} of {self.window:,}"


@dataclass(frozen=True)
class StatePart:
    """Numbers that a layer keeps for a sequence of any length, in `num_heads` equal parts that ranks share out."""

    num_elements: int
    num_heads: int
    bits: int | None  # None: as K and V are stored

    def rank_bytes(self, ranks: int, kv_bits: int) -> int:
        """On one of `ranks`: its heads; where there are more ranks than heads, one head, held several times."""
        per_head = self.num_elements // self.num_heads
        return per_head * -(-self.num_heads // ranks) * (kv_bits if self.bits is None else self.bits) // 8


@dataclass(frozen=True)
class StateLayer:
    """The state of one layer, and what computes it: "gated delta net", "Mamba-2", "cross attention"."""

    kind: str
    parts: tuple[StatePart, ...]
    num_heads: int  # that a number of ranks has to divide

    def rank_bytes(self, ranks: int, kv_bits: int) -> int:
        return sum(part.rank_bytes(ranks, kv_bits) for part in self.parts)
