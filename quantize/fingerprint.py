"""What a result depends on, as text: two runs with equal fingerprints write equal bytes."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from llmq.quantize.calibration import CalibrationSet
from llmq.quantize.layer_stream import served_dtype
from llmq.quantize.preflight import Plan

Fingerprint = dict[str, dict[str, str]]  # section -> what -> value

PACKAGES = ("llmq-toolkit", "torch", "transformers", "llmcompressor", "compressed-tensors")


def fingerprint(plan: Plan, calibration: CalibrationSet | None, device: torch.device) -> Fingerprint:
    """Sections: model, recipe, calibration, code, machine."""
    return {
        "model": _model(plan.source.path),
        "recipe": {
            **_flat(asdict(plan.recipe)),
            "schemes": _digest(json.dumps({name: asdict(s) for name, s in plan.settings.items()}).encode()),
            "left alone": ", ".join(plan.selection.left_alone),
        },
        "calibration": {} if calibration is None else _calibration(calibration),
        "code": {**versions(), "sources": _sources()},
        "machine": {**_machine(device), "products": str(served_dtype(plan.source, device))},
    }


def differences(old: Fingerprint, new: Fingerprint) -> list[str]:
    """`recipe: options.damp was 0.01, is 0.05`, for everything that differs."""
    found = []
    for section in new:
        before, after = old.get(section, {}), new[section]
        for key in dict.fromkeys((*before, *after)):
            if before.get(key) != after.get(key):
                found.append(f"{section}: {key} was {before.get(key, 'not there')}, is {after.get(key, 'not there')}")
    return found


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _model(folder: Path) -> dict[str, str]:
    """Small files by content; weight files by header, size and time of change.

    Reading all weights to hash them would take as long as a good part of the work; a file whose bytes changed under the
    same size and the same time, to the nanosecond, was made to deceive.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            stat = path.stat()
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = file.read(min(length, stat.st_size))
            found[path.name] = f"{stat.st_size:,} bytes of {stat.st_mtime_ns}, header {_digest(header)}"
        elif path.suffix in (".json", ".jinja", ".model", ".txt") and path.is_file():
            found[path.name] = _digest(path.read_bytes())
    return found


def _calibration(calibration: CalibrationSet) -> dict[str, str]:
    digest = hashlib.sha256()
    for sample in calibration.samples:
        digest.update(json.dumps(sample).encode())
    return {**_flat(calibration.as_dict()), "token ids": digest.hexdigest()[:16]}


def _sources() -> str:
    """Of this package's own code, and of what it knows of decoders (`profiles`)."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted((*folder.rglob("*.py"), *(folder.parent / "profiles").glob("*.py"))):
        digest.update(str(path.relative_to(folder.parent)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _machine(device: torch.device) -> dict[str, str]:
    """Products are summed in an order that depends on these."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"device": f"{device} ({name})", "threads": str(torch.get_num_threads())}


def _flat(content: Any, prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}"""
    if isinstance(content, dict):
        entries: Iterable[tuple[str, Any]] = content.items()
        return {k: v for key, value in entries for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()}
    return {prefix: json.dumps(content, default=str)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
