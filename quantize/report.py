"""What was done to each layer and what it cost: quantization_report.json, and the numbers the command prints."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmq.quantize.formats.compressed_tensors import to_tensors
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.targets import Target

REPORT_FILE = "quantization_report.json"


@dataclass(frozen=True)
class LinearReport:
    """One quantized linear. Errors are relative energies: E|W'x - Wx|^2 / E|Wx|^2, or |W' - W|^2 / |W|^2."""

    name: str
    scheme: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    weight_error: float  # against the weight that was rounded: where scales were moved into it, after that
    output_error: float | None = None  # None: not computed, no calibration tokens went through it here
    rtn_output_error: float | None = None  # what plain rounding to the same scheme would have cost
    saturated_share: float | None = None  # weights outside the range that was kept
    dead_inputs: int | None = None  # input channels that no calibration token ever used
    num_tokens: int | None = None  # that its statistics were taken of
    damping: float | None = None  # that was added to the Hessian, as a share of its mean diagonal
    routed_tokens: int | None = None  # of an expert: what the router sent to it
    method: str | None = None


@dataclass(frozen=True)
class ScalingReport:
    """One group of linears that share an input, and the scales moved from it into their source."""

    layer: int
    source: str
    linears: tuple[str, ...]
    skipped: str | None = None  # why nothing was moved
    alpha: float | None = None  # None: no scaling was better than any
    error: float | None = None
    unscaled_error: float | None = None
    num_unusable: int = 0  # candidates not finite in the stored dtype
    num_sharing: int = 1  # query heads that share the scales of the KV head they read


@dataclass(frozen=True)
class QuantizationReport:
    """The content of quantization_report.json. Sizes are of tensors; `files_bytes` is what OUT takes on disk."""

    tool: str
    versions: dict[str, str]
    source: str
    method: str
    scheme: str
    recipe: dict[str, Any]
    settings: dict[str, Any]  # of the method itself: what its search looked at, damping, who computed it
    group_size: dict[str, Any]
    calibration: dict[str, Any] | None
    linears: list[LinearReport]
    scalings: list[ScalingReport]
    left_alone: dict[str, str]
    bytes_before: int
    bytes_after: int
    predicted_bytes: int
    bits_per_weight: float  # of all weights, those left in 16 bit included
    bits_per_quantized_weight: float | None  # None: nothing is rounded
    duration_s: float
    warnings: list[str]
    loaders: tuple[str, ...] = ()  # who runs OUT packed, by the table of formats
    proof: dict[str, Any] | None = None  # perplexity, KL and top-1 against the original; who asked for one adds it
    search: dict[str, Any] | None = None  # of --target or --max-kl: the goal, and what was chosen

    def as_dict(self) -> dict[str, Any]:
        own = {"linears": [vars(one) for one in self.linears], "scalings": [vars(one) for one in self.scalings]}
        return {**vars(self), **own}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "QuantizationReport":
        """The inverse of `as_dict`, of what JSON makes of it too."""
        linears = [LinearReport(**{**one, "shape": tuple(one["shape"])}) for one in content["linears"]]
        scalings = [ScalingReport(**{**one, "linears": tuple(one["linears"])}) for one in content["scalings"]]
        return cls(
            **{**content, "linears": linears, "scalings": scalings, "loaders": tuple(content.get("loaders", ()))}
        )

    def mean_output_error(self) -> tuple[float, float] | None:
        """Mean relative output error over the linears: (this method's, plain rounding's); None if not computed."""
        pairs = [
            (entry.output_error, entry.rtn_output_error)
            for entry in self.linears
            if entry.output_error is not None and entry.rtn_output_error is not None
        ]
        if not pairs:
            return None
        return sum(ours for ours, _ in pairs) / len(pairs), sum(rtn for _, rtn in pairs) / len(pairs)


def linear_report(target: Target, weight: QuantizedWeight, *, weight_error: float, **measured: Any) -> LinearReport:
    """The report of one linear; `measured`: further fields of LinearReport."""
    return LinearReport(
        name=target.name,
        scheme=weight.scheme.name,
        shape=weight.shape,
        bytes_before=target.num_bytes,
        bytes_after=sum(tensor.nbytes for tensor in to_tensors(target.name, weight).values()),
        weight_error=weight_error,
        **measured,
    )


def relative_error(stored: Tensor, original: Tensor) -> float:
    """|W' - W|^2 / |W|^2"""
    return float((stored - original).square().sum() / original.square().sum().clamp(min=1e-30))
