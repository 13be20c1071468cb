"""What a method hands over for one decoder layer, whoever computed it."""

from dataclasses import dataclass, field

from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.report import LinearReport, ScalingReport


@dataclass
class LayerResult:
    """Names are the checkpoint's. `changed`: tensors that stay in 16 bit and took a scale, in the dtype stored."""

    linears: dict[str, QuantizedWeight] = field(default_factory=dict)
    reports: list[LinearReport] = field(default_factory=list)
    changed: dict[str, Tensor] = field(default_factory=dict)
    scalings: list[ScalingReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
