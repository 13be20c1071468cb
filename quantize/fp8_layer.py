"""FP8 on one decoder layer: each weight on its own, and of a static scheme the range of each input."""

import torch
from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.fp8 import quantize_fp8, search_scale, static_input_scale
from llmq.quantize.layer_work import InputSample, LayerOutcome, LayerWork, LinearOutcome

# Tokens that the output error is measured on.
MEASURED_TOKENS = 512


def quantize_layer(work: LayerWork) -> LayerOutcome:
    """FP8 as a method. Runs the samples only where a scheme has static activations; else none are needed.

    Linears that share an input share its scale, and a per-tensor scale of their weights too: what fuses them (q/k/v,
    gate/up) would otherwise have to round them again.
    """
    static = [name for name, s in work.schemes.items() if s.activation is not None and not s.activation.dynamic]
    inputs = work.sample_inputs(static, MEASURED_TOKENS) if static else {}
    outcome = LayerOutcome()
    for name, scale in _weight_scales(work, inputs).items():
        linear, own = work.linear(name), inputs.get(name)
        original = linear.weight.detach().clone()
        input_scale = None if own is None else static_input_scale(float(own.max_abs.max()), work.dtype)
        stored = quantize_fp8(original, work.schemes[name], work.dtype, scale, input_scale)
        linear.weight.copy_(stored.dequantize())
        outcome.linears[name] = _outcome(stored, original, linear.weight, own)
    return outcome


def _weight_scales(work: LayerWork, inputs: dict[str, InputSample]) -> dict[str, Tensor]:
    scales: dict[str, Tensor] = {}
    for name, scheme in work.schemes.items():
        together = [name]
        if scheme.strategy == "tensor" and name in inputs:
            together = [n for n, seen in inputs.items() if seen is inputs[name] and work.schemes[n] == scheme]
        if name not in scales:
            scale = search_scale(torch.cat([work.linear(n).weight for n in together]), scheme, work.dtype)
            scales.update(dict.fromkeys(together, scale))
    return scales


def _outcome(stored: QuantizedWeight, original: Tensor, dense: Tensor, inputs: InputSample | None) -> LinearOutcome:
    delta = dense - original
    measured = {}
    if inputs is not None:
        energy = (inputs.tokens @ original.T).square().sum().clamp(min=1e-30)
        measured = {
            "output_error": float((inputs.tokens @ delta.T).square().sum() / energy),
            "num_dead_inputs": int((inputs.max_abs == 0).sum()),
            "num_tokens": inputs.num_tokens,
        }
    moved, size = torch.linalg.vector_norm(delta), torch.linalg.vector_norm(original)
    return LinearOutcome(stored, weight_error=float((moved / size.clamp(min=1e-15)).square()), **measured)
