"""Scales of a linear's input channels, moved into whatever computes that input (`mappings.ScaleMapping`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from llmq.profiles.errors import FailedError
from llmq.quantize.layer_work import LayerWork
from llmq.quantize.mappings import ScaleMapping

# Folding is an identity in exact arithmetic; in float32 it moves what a layer adds by this share of its largest number.
FOLDING_TOLERANCE = 1e-3
# Tokens that this is looked at on: a table of mappings that is wrong changes every one of them.
CHECKED_TOKENS = 128


class ScaleFolding:
    """The scales of one layer's mappings: which of those wanted can be had exactly, and moving them."""

    def __init__(self, work: LayerWork) -> None:
        self.work, self.modules = work, dict(work.layer.named_modules())

    def realize(self, mapping: ScaleMapping, s: Tensor) -> Tensor | None:
        """The scales nearest to `s` ([in]) by which the source can be divided without any error; None: there are none.

        Query heads that read one KV head must agree: the geometric mean of what each would like. What is stored in 16
        bit, a norm or a bias, takes the scale that its rounded quotient stands for.
        """
        if mapping.kind == "heads":
            s = self._by_kv_head(mapping, s).log().mean(1).exp().flatten()
        name, vector = self._stored_vector(mapping)
        if name:
            effective = vector + mapping.offset
            stored = self._divided(mapping, vector, s).to(torch.float32) + mapping.offset
            if not bool(torch.isfinite(stored).all()) or bool(((stored == 0) & (effective != 0)).any()):
                return None
            s = torch.where(effective == 0, s, effective / torch.where(stored == 0, 1.0, stored))
        if mapping.kind == "heads":
            s = s.view(-1, 1, self.work.head_dim).expand(-1, self._queries_per_kv_head(mapping), -1).flatten()
        return s if bool((torch.isfinite(s) & (s > 0)).all()) else None

    def fold(self, mapping: ScaleMapping, s: Tensor) -> dict[str, Tensor]:
        """Multiply the input columns of the linears by s, as `realize` gave it, and divide the source's channels by it.

        In place; returns what of the source is stored in 16 bit.
        """
        for name in mapping.linears:
            self.modules[name].weight.mul_(s)
        if mapping.kind == "heads":
            s = self._by_kv_head(mapping, s)[:, 0].flatten()
        if mapping.kind != "norm":
            self.modules[mapping.source].weight.div_(s.unsqueeze(1))
        name, vector = self._stored_vector(mapping)
        if not name:
            return {}
        stored = self._divided(mapping, vector, s)
        vector.copy_(stored)
        return {name: stored}

    def num_sharing(self, mapping: ScaleMapping) -> int:
        """The query heads that have one scale for each channel together: those that read one KV head."""
        return self._queries_per_kv_head(mapping) if mapping.kind == "heads" else 1

    @contextmanager
    def checked(self, method: str) -> Iterator[None]:
        """What is folded inside must not change what the layer adds to the beginning of its first sample. Raises
        FailedError if it did: then the mappings are not those of this layer.
        """
        before = self._addition()
        yield
        moved = float((self._addition() - before).abs().max() / before.abs().max().clamp(min=1e-30))
        if not moved < FOLDING_TOLERANCE:
            raise FailedError(
                f"folding the scales of {method} changed a layer's output by {moved:.2g} of its largest number: "
                "the table of mappings is wrong for this model"
            )

    def _addition(self) -> Tensor:
        sample = self.work.samples[0][:1, :CHECKED_TOKENS]
        output = self.work.run(sample)
        return output - sample.to(output.device)

    def _divided(self, mapping: ScaleMapping, vector: Tensor, s: Tensor) -> Tensor:
        """The source's vector after the division, as it is stored."""
        return ((vector + mapping.offset) / s - mapping.offset).to(self.work.dtype)

    def _stored_vector(self, mapping: ScaleMapping) -> tuple[str | None, Tensor | None]:
        """What of the source is stored in 16 bit and divided by the scales: a norm's weight, a bias, or nothing."""
        source = self.modules[mapping.source]
        if mapping.kind == "norm":
            return f"{mapping.source}.weight", source.weight
        return (None, None) if source.bias is None else (f"{mapping.source}.bias", source.bias)

    def _by_kv_head(self, mapping: ScaleMapping, s: Tensor) -> Tensor:
        """[num_heads * head_dim] -> [num_kv_heads, queries per KV head, head_dim]"""
        return s.view(-1, self._queries_per_kv_head(mapping), self.work.head_dim)

    def _queries_per_kv_head(self, mapping: ScaleMapping) -> int:
        return self.modules[mapping.linears[0]].in_features // self.modules[mapping.source].out_features
