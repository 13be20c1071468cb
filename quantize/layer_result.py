"""What a method hands over for one decoder layer, whoever computed it; and the file that keeps it."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmq.quantize.formats.compressed_tensors import ConfigGroup, QuantizationConfig, to_tensors
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.report import LinearReport, ScalingReport


@dataclass
class LayerResult:
    """Names are the checkpoint's. `changed`: tensors that stay in 16 bit and took a scale, in the dtype stored."""

    linears: dict[str, QuantizedWeight] = field(default_factory=dict)
    reports: list[LinearReport] = field(default_factory=list)
    changed: dict[str, Tensor] = field(default_factory=dict)
    kv_scales: dict[str, Tensor] = field(default_factory=dict)  # [1]: of K and of V, where they are calibrated
    scalings: list[ScalingReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is stored, in the compressed-tensors layout."""
        stored = {}
        for name, weight in self.linears.items():
            stored |= to_tensors(name, weight)
        return stored | self.changed | self.kv_scales


def save_result(result: LayerResult, path: Path) -> None:
    """Write `path` so that after any end of the process or the machine it is whole or not there."""
    facts = {
        "linears": list(result.linears),
        "changed": list(result.changed),
        "kv_scales": list(result.kv_scales),
        "reports": [vars(report) for report in result.reports],
        "scalings": [vars(scaling) for scaling in result.scalings],
        "warnings": result.warnings,
    }
    partial = path.with_suffix(".partial")
    save_tensors(result.tensors, partial, json.dumps(facts))
    flush(partial)
    os.replace(partial, path)
    flush(path.parent)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, facts: str = "{}") -> None:
    # A clone: a view of a larger tensor would be refused, or share its storage with another name.
    whole = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt", "layer": facts})


def load_facts(path: Path) -> dict[str, Any]:
    """What `save_result` wrote beside the tensors: names, reports, scalings, warnings."""
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["layer"])
    facts["reports"] = [LinearReport(**{**entry, "shape": tuple(entry["shape"])}) for entry in facts["reports"]]
    facts["scalings"] = [ScalingReport(**{**entry, "linears": tuple(entry["linears"])}) for entry in facts["scalings"]]
    return facts


def load_result(path: Path, schemes: Mapping[str, WeightScheme]) -> LayerResult:
    """The inverse of `save_result`. schemes: of the linears, by name."""
    facts = load_facts(path)
    with safe_open(path, "pt") as file:
        linears = {
            name: QuantizationConfig((ConfigGroup((name,), schemes[name]),)).read(name, file.get_tensor)
            for name in facts["linears"]
        }
        changed = {name: file.get_tensor(name) for name in facts["changed"]}
        kv_scales = {name: file.get_tensor(name) for name in facts["kv_scales"]}
    return LayerResult(linears, facts["reports"], changed, kv_scales, facts["scalings"], facts["warnings"])


def flush(path: Path) -> None:
    """Have a file or a folder on the disk, not in its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
