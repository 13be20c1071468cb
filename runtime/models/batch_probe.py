"""Whether a foreign model's code can serve a batch over our attention: tried on eight tokens, before it serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError

# What transformers' layers hand to any attention function, and means nothing to a causal one in inference.
_HARMLESS = (
    *("dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states"),
    *("cache_position", "return_dict", "output_router_logits", "position_embeddings", "past_key_values"),
)


@dataclass(frozen=True)
class AttentionCall:
    """One call of a model's attention: q, k, v [num_tokens, heads, head_dim] and what it says about them."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    window: int | None
    others: Mapping[str, Any]


class Attend(Protocol):
    def __call__(self, call: AttentionCall) -> Tensor: ...  # [num_tokens, num_heads, head_dim_v]


class PackedDecoder(Protocol):
    def hidden_states(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class BatchProbe:
    """Two short sequences, together and alone, through a model whose attention tells them apart by their positions."""

    def __init__(self, architecture: ModelArchitecture, device: torch.device) -> None:
        self.architecture = architecture
        self.positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2], device=device)
        self.token_ids = torch.arange(3, 11, device=device) % architecture.vocab_size
        self._called: list[int] = []

    def logits_of(self, model: nn.Module) -> Tensor:
        """Logits of the first sequence, as the model's whole forward gives them."""
        with torch.inference_mode():
            ids, positions = self.token_ids[None, :5], self.positions[None, :5]
            attend = self._attend(self.positions[:5])
            return model(input_ids=ids, position_ids=positions, use_cache=False, llmq_attend=attend).logits[0].float()

    @torch.inference_mode()
    def check(self, decoder: PackedDecoder, whole: Tensor) -> None:
        """Raises InputError for a model that our attention alone cannot serve."""
        together = self._hidden(decoder, slice(None))
        if sorted(self._called) != list(range(self.architecture.num_layers)):
            raise InputError(f"of {self.architecture.num_layers} layers, {len(set(self._called))} call attention once")
        alone = torch.cat([self._hidden(decoder, slice(0, 5)), self._hidden(decoder, slice(5, None))])
        if not _close(together, alone):
            raise InputError("sequences of one batch see each other in this model's code: it cannot be served")
        if not _close(decoder.logits(together[:5]), whole):
            raise InputError("this model's logits are not a function of its decoder's hidden states")

    def _hidden(self, decoder: PackedDecoder, rows: slice) -> Tensor:
        self._called = []
        positions = self.positions[rows]
        return decoder.hidden_states(self.token_ids[rows], positions, self._attend(positions))

    def _attend(self, positions: Tensor) -> Attend:
        """Dense attention of sequences that lie one after the other, each starting at position 0."""
        sequence = (positions == 0).cumsum(0)
        distance = positions[:, None] - positions
        seen = (sequence[:, None] == sequence) & (distance >= 0)

        def attend(call: AttentionCall) -> Tensor:
            self._check_call(call)
            self._called.append(call.layer)
            mask = seen if call.window is None else seen & (distance < call.window)
            q, k, v = (part.transpose(0, 1).float() for part in (call.q, call.k, call.v))
            k, v = (part.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for part in (k, v))
            scores = q @ k.transpose(1, 2) * call.scale
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            scores = scores.masked_fill(~mask, -torch.inf)
            return (scores.softmax(dim=-1) @ v).transpose(0, 1).to(call.q.dtype)

        return attend

    def _check_call(self, call: AttentionCall) -> None:
        if not 0 <= call.layer < self.architecture.num_layers:
            raise InputError(f"attention of a layer {call.layer}, of {self.architecture.num_layers}")
        spec = self.architecture.attention[call.layer]
        made = ((call.k.shape[1], call.k.shape[2]), (call.v.shape[1], call.v.shape[2]), call.window)
        expected = ((spec.num_kv_heads, spec.head_dim_k), (spec.num_kv_heads, spec.head_dim_v), spec.window)
        if made != expected:
            raise InputError(
                f"layer {call.layer} has K, V and window {made}, config.json let expect {expected}: the KV-cache would "
                "not be the one that was planned"
            )
        unknown = [
            name
            for name, value in call.others.items()
            if name not in _HARMLESS and value is not None and value is not False
        ]
        if unknown:
            raise InputError(f"its attention takes {', '.join(unknown)}, which our attention kernels do not know")


def _close(made: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, in any dtype: what leaks from a neighbour is far larger."""
    return bool((made.float() - expected.float()).abs().max() <= 0.05 * expected.float().abs().max())
