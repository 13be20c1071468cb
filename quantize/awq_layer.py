"""AWQ on one decoder layer: measure its inputs, search and fold the scales, clip, round, and check the folding."""

import torch
from torch import Tensor

from llmq.profiles.errors import FailedError
from llmq.quantize.awq import output_error, search_clip, search_scales
from llmq.quantize.layer_work import InputStatistics, LayerOutcome, LayerWork, LinearOutcome, ScalingOutcome
from llmq.quantize.mappings import ScaleMapping, why_skipped
from llmq.quantize.rounding import range_grid, round_trip, saturated_share

# Folding is an identity in exact arithmetic; in float32 it moves what a layer adds by this share of its largest number.
FOLDING_TOLERANCE = 1e-3


def quantize_layer(work: LayerWork) -> LayerOutcome:
    """AWQ as a method: fold scales, clip and round. Folding must not change what the layer adds to its input."""
    return AwqLayer(work).quantize()


class AwqLayer:
    """One layer on its way through AWQ."""

    def __init__(self, work: LayerWork) -> None:
        self.work, self.modules = work, dict(work.layer.named_modules())
        self.moments: dict[str, InputStatistics] = {}
        self.column_scales: dict[str, Tensor] = {}

    def quantize(self) -> LayerOutcome:
        outcome = LayerOutcome()
        self.moments = self.work.measure()
        before = self._addition()
        for mapping in self.work.mappings:
            outcome.scalings.append(self._scale(mapping, outcome.changed))
        self._check_identity(before, self._addition())
        for name in self.work.schemes:
            outcome.linears[name] = self._round(name)
        return outcome

    def _addition(self) -> Tensor:
        """What the layer adds to the first sample."""
        sample = self.work.samples[0]
        output = self.work.run(sample)
        return output - sample.to(output.device)

    def _scale(self, mapping: ScaleMapping, changed: dict[str, Tensor]) -> ScalingOutcome:
        if skipped := why_skipped(mapping, set(self.work.schemes)):
            return ScalingOutcome(mapping, skipped)
        linears = [self.modules[name] for name in mapping.linears]
        choice = search_scales(
            [linear.weight for linear in linears],
            self.moments[mapping.linears[0]],
            self.work.schemes[mapping.linears[0]],
            self.work.dtype,
            lambda s: self._realize(mapping, s),
        )
        is_scaled = bool((choice.scales != 1).any())
        if is_scaled:
            for name, linear in zip(mapping.linears, linears, strict=True):
                linear.weight.mul_(choice.scales)
                self.column_scales[name] = choice.scales
            changed.update(self._divide_source(mapping, choice.scales))
        return ScalingOutcome(
            mapping,
            alpha=choice.alpha if is_scaled else None,
            error=choice.error,
            unscaled_error=choice.unscaled_error,
            num_unusable=choice.num_unusable,
        )

    def _realize(self, mapping: ScaleMapping, s: Tensor) -> Tensor | None:
        """The scales nearest to `s` by which the source can be divided without any error; None if there are none."""
        if mapping.kind == "heads":
            # Query heads that read one KV head must agree: the geometric mean of what each would like.
            s = self._by_kv_head(mapping, s).log().mean(1).exp().flatten()
        name, vector = self._stored_vector(mapping)
        if name:
            # It is stored in 16 bit: take the scale that its rounded quotient stands for, and folding stays exact.
            stored = (vector / s).to(self.work.dtype).to(torch.float32)
            if not bool(torch.isfinite(stored).all()) or bool(((stored == 0) & (vector != 0)).any()):
                return None
            s = torch.where(vector == 0, s, vector / torch.where(vector == 0, 1.0, stored))
        if mapping.kind == "heads":
            queries = self._queries_per_kv_head(mapping)
            s = s.view(-1, 1, self.work.head_dim).expand(-1, queries, -1).flatten()
        return s

    def _divide_source(self, mapping: ScaleMapping, s: Tensor) -> dict[str, Tensor]:
        """Divide the source's output channels by s, in place; returns what of it is stored in 16 bit."""
        if mapping.kind == "heads":
            s = self._by_kv_head(mapping, s)[:, 0].flatten()
        if mapping.kind != "norm":
            self.modules[mapping.source].weight.div_(s.unsqueeze(1))
        name, vector = self._stored_vector(mapping)
        if not name:
            return {}
        stored = (vector / s).to(self.work.dtype)
        vector.copy_(stored)
        return {name: stored}

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

    def _round(self, name: str) -> LinearOutcome:
        linear, moments, scheme = self.modules[name], self.moments[name], self.work.schemes[name]
        weight = linear.weight.detach().clone()
        gram, s = moments.gram, self.column_scales.get(name)
        unscaled = weight if s is None else weight / s
        rtn_error = output_error(round_trip(unscaled, scheme, self.work.dtype) - unscaled, gram)
        if s is not None:
            gram = gram / torch.outer(s, s)
        clip = search_clip(weight, gram, scheme, self.work.dtype)
        grid = range_grid(weight, scheme, self.work.dtype, clip)
        stored = grid.store(grid.nearest(weight), self.work.dtype)
        linear.weight.copy_(stored.dequantize(torch.float32))
        delta, energy = linear.weight - weight, output_error(weight, gram) or 1.0
        return LinearOutcome(
            weight=stored,
            output_error=output_error(delta, gram) / energy,
            rtn_output_error=rtn_error / energy,
            weight_error=float(delta.square().sum() / weight.square().sum().clamp(min=1e-30)),
            saturated_share=saturated_share(weight, grid),
            num_dead_inputs=moments.num_dead,
            num_tokens=moments.num_tokens,
        )

    @staticmethod
    def _check_identity(before: Tensor, after: Tensor) -> None:
        moved = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
        if not moved < FOLDING_TOLERANCE:
            raise FailedError(
                f"folding AWQ's scales changed a layer's output by {moved:.2g} of its largest number: "
                "the table of mappings is wrong for this model"
            )
