"""Accelerators by name, from devices.toml: memory, bandwidth, arithmetic, each with its source."""

import difflib
import functools
import re
import tomllib
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from llmq.profiles.errors import InputError


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are dense; None where the hardware does not compute in that format."""

    name: str
    memory_bytes: int  # usable, as CUDA or ROCm reports it
    bandwidth_bytes_per_s: float | None = None
    fp16_tflops: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    int8_tflops: float | None = None
    fp4_tflops: float | None = None
    link_gb_s: float | None = None  # to other devices, one direction
    price_per_hour: float | None = None  # US dollars, on demand
    price_source: str = ""
    source: str = ""
    note: str = ""


def find_device(name: str, own: Path | None = None) -> Device:
    """The device called `name`, in any spelling ("h100", "H100-SXM", "NVIDIA H100 80GB HBM3"). Raises InputError.

    own: a file like devices.toml; its rows come before those that have the same name here.
    """
    known = {**_by_name(None), **(_by_name(own) if own else {})}
    wanted = _normalized(name)
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    hint = (
        f"did you mean {known[near[0]].name}?"
        if near
        else "known: " + ", ".join(device.name for device in all_devices(own))
    )
    raise InputError(f"no GPU {name!r} in devices.toml ({hint}); --memory 80GiB works for any")


def all_devices(own: Path | None = None) -> tuple[Device, ...]:
    """Every device, those of the file `own` in place of those of the same name."""
    named = {device.name: device for device, _ in (*_read(None), *(_read(own) if own else ()))}
    return tuple(named.values())


def _by_name(path: Path | None) -> dict[str, Device]:
    return {_normalized(name): device for device, aliases in _read(path) for name in (device.name, *aliases)}


@functools.cache
def _read(path: Path | None) -> tuple[tuple[Device, tuple[str, ...]], ...]:
    """The rows of a file, with their other names; None: of the one that comes with llmq. Raises InputError."""
    source = path or files("llmq.profiles").joinpath("devices.toml")
    try:
        entries = tomllib.loads(source.read_text(encoding="utf-8")).get("device")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--devices {path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise InputError(f"--devices {path}: it has no [[device]]")
    return tuple((_device(entry, path), tuple(entry.get("aliases", ()))) for entry in entries)


_TEXTS = ("name", "aliases", "source", "price_source", "note")
_GIVEN = {field.name for field in fields(Device)} - {"memory_bytes", "bandwidth_bytes_per_s"}
_KEYS = sorted({*_GIVEN, "aliases", "memory_gib", "bandwidth_gb_s"})


def _device(entry: dict[str, Any], path: Path | None) -> Device:
    if unknown := sorted(set(entry) - set(_KEYS)):
        raise InputError(f"--devices {path}: {', '.join(unknown)} is none of {', '.join(_KEYS)}")
    if missing := [key for key in ("name", "memory_gib", "source") if not entry.get(key)]:
        raise InputError(f"--devices {path}: a [[device]] without {', '.join(missing)}")
    numbers = {key: value for key, value in entry.items() if key not in _TEXTS}
    for key, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise InputError(f"--devices {path}: {key} = {value!r} of {entry['name']}: a number above 0 is expected")
    bandwidth = entry.get("bandwidth_gb_s")
    return Device(
        memory_bytes=round(entry["memory_gib"] * 2**30),
        bandwidth_bytes_per_s=bandwidth * 1e9 if bandwidth else None,
        **{name: value for name, value in entry.items() if name in _GIVEN},
    )


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("amd").removeprefix("instinct")
