"""AWQ on one decoder layer: measure its inputs, search and fold the scales, clip, round to nearest, fit the steps."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmq.quantize.awq import output_error, scaled_round_trip, search_clip, search_scales
from llmq.quantize.layer_work import InputStatistics, LayerOutcome, LayerWork, LinearOutcome, ScalingOutcome
from llmq.quantize.mappings import ScaleMapping, why_skipped
from llmq.quantize.rounding import range_grid, round_trip, saturated_share
from llmq.quantize.scale_fit import refit_scales
from llmq.quantize.scale_folding import ScaleFolding

# Tokens that the layer's output is compared on, and the samples that they are the beginnings of.
SEARCH_TOKENS = 1024
SEARCH_SAMPLES = 4


def quantize_layer(work: LayerWork) -> LayerOutcome:
    """AWQ as a method: fold scales, clip and round. Folding must not change what the layer adds to its input."""
    return AwqLayer(work).quantize()


def smooth_layer(work: LayerWork) -> tuple[dict[str, Tensor], list[ScalingOutcome]]:
    """Fold the scales and round nothing: the layer still computes what it did.

    Returns what took a scale and stays in 16 bit, as it is stored, and what each mapping came to.
    """
    outcome = LayerOutcome()
    AwqLayer(work).smooth(outcome)
    return outcome.changed, outcome.scalings


class AwqLayer:
    """One layer on its way through AWQ."""

    def __init__(self, work: LayerWork) -> None:
        self.work, self.folding = work, ScaleFolding(work)
        self.moments: dict[str, InputStatistics] = {}
        self.column_scales: dict[str, Tensor] = {}

    def quantize(self) -> LayerOutcome:
        outcome = LayerOutcome()
        self.smooth(outcome)
        for name in self.work.schemes:
            outcome.linears[name] = self._round(name)
        return outcome

    def smooth(self, outcome: LayerOutcome) -> None:
        self.moments = self.work.measure()
        with self.folding.checked("AWQ"):
            for mapping in self.work.mappings:
                outcome.scalings.append(self._scale(mapping, outcome.changed))

    def _scale(self, mapping: ScaleMapping, changed: dict[str, Tensor]) -> ScalingOutcome:
        if skipped := why_skipped(mapping, set(self.work.schemes)):
            return ScalingOutcome(mapping, skipped)
        choice = search_scales(
            [self.work.linear(name).weight for name in mapping.linears],
            self.moments[mapping.linears[0]],
            self.work.schemes[mapping.linears[0]],
            self.work.dtype,
            lambda s: self.folding.realize(mapping, s),
            self._layer_error(mapping) if mapping.kind == "norm" else None,
        )
        is_scaled = bool((choice.scales != 1).any())
        if is_scaled:
            self.column_scales.update(dict.fromkeys(mapping.linears, choice.scales))
            changed.update(self.folding.fold(mapping, choice.scales))
        return ScalingOutcome(
            mapping,
            alpha=choice.alpha if is_scaled else None,
            error=choice.error,
            unscaled_error=choice.unscaled_error,
            num_unusable=choice.num_unusable,
            num_sharing=self.folding.num_sharing(mapping),
        )

    def _layer_error(self, mapping: ScaleMapping) -> Callable[[Tensor], float]:
        """Scales -> |dy|^2 / |y|^2 of what the layer adds to some tokens, the mapping's linears rounded under them."""
        linears = {self.work.linear(name): self.work.schemes[name] for name in mapping.linears}
        originals = [linear.weight.clone() for linear in linears]
        samples = _short_samples(self.work.samples)
        expected = [self._addition(sample) for sample in samples]
        energy = sum(float(y.square().sum()) for y in expected) or 1.0

        def error_of(s: Tensor) -> float:
            for (linear, scheme), weight in zip(linears.items(), originals, strict=True):
                linear.weight.copy_(scaled_round_trip(weight, s, scheme, self.work.dtype))
            made = [self._addition(sample) for sample in samples]
            for linear, weight in zip(linears, originals, strict=True):
                linear.weight.copy_(weight)
            return sum(float((y - z).square().sum()) for y, z in zip(made, expected, strict=True)) / energy

        return error_of

    def _addition(self, sample: Tensor) -> Tensor:
        output = self.work.run(sample)
        return output - sample.to(output.device)

    def _round(self, name: str) -> LinearOutcome:
        linear, moments, scheme = self.work.linear(name), self.moments[name], self.work.schemes[name]
        weight = linear.weight.detach().clone()
        gram, s = moments.gram, self.column_scales.get(name)
        unscaled = weight if s is None else weight / s
        rtn_error = output_error(round_trip(unscaled, scheme, self.work.dtype) - unscaled, gram)
        if s is not None:
            gram = gram / torch.outer(s, s)
        clip = search_clip(weight, gram, scheme, self.work.dtype)
        grid = range_grid(weight, scheme, self.work.dtype, clip)
        q = grid.nearest(weight)
        grid = refit_scales(weight, gram, grid, q, self.work.dtype)
        stored = grid.store(q, self.work.dtype)
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


def _short_samples(samples: Sequence[Tensor]) -> list[Tensor]:
    """The beginnings of samples, evenly spread, SEARCH_TOKENS in all where there are as many."""
    longest = SEARCH_TOKENS // SEARCH_SAMPLES
    return [samples[i][:, :longest] for i in range(0, len(samples), -(-len(samples) // SEARCH_SAMPLES))]
