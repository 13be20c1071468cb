"""Several methods on one decoder layer, and the one kept whose layer computes nearest to the original."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from llmq.quantize.layer_work import LayerOutcome, LayerWork, Method

# Batches of samples that the layer's output is compared on: methods differ by far more than these do.
NUM_COMPARED = 4


def quantize_layer(work: LayerWork, methods: Mapping[str, Method]) -> LayerOutcome:
    """The outcome of the method with the least E|Δ|² / E|y|², with y what the layer adds to its input.

    The layer's own output counts, not the sum of its linears' errors: attention, the gate and the norms that took
    scales are in it. Holds the layer's weights three times.
    """
    samples = [work.samples[index] for index in range(min(NUM_COMPARED, len(work.samples)))]
    added = [work.run(sample).cpu() - sample.cpu() for sample in samples]
    energy = sum(float(one.square().sum()) for one in added)
    original = _state(work)
    best: tuple[float, LayerOutcome, dict[str, Tensor]] | None = None
    for name, method in methods.items():
        _restore(work, original)
        outcome = method(work)
        moved = sum(
            float((work.run(sample).cpu() - sample.cpu() - one).square().sum())
            for sample, one in zip(samples, added, strict=True)
        )
        error = moved / max(energy, 1e-30)
        if best is None or error < best[0]:
            for linear, made in outcome.linears.items():
                outcome.linears[linear] = replace(made, method=name)
            best = error, outcome, _state(work)
    _, outcome, state = best
    _restore(work, state)
    return outcome


@torch.no_grad()
def _state(work: LayerWork) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in work.layer.named_parameters()}


@torch.no_grad()
def _restore(work: LayerWork, state: dict[str, Tensor]) -> None:
    for name, parameter in work.layer.named_parameters():
        parameter.copy_(state[name])
