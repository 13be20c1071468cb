"""Accelerators by name, from devices.toml: memory, bandwidth, arithmetic, each with its source."""

import difflib
import functools
import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files

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
    source: str = ""
    note: str = ""


def find_device(name: str) -> Device:
    """The device called `name`, in any spelling ("h100", "H100-SXM", "NVIDIA H100 80GB HBM3"). Raises InputError."""
    names = _by_name()
    wanted = _normalized(name)
    if wanted in names:
        return names[wanted]
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.6)
    hint = (
        f"did you mean {names[near[0]].name}?"
        if near
        else "known: " + ", ".join(device.name for device in all_devices())
    )
    raise InputError(f"no GPU {name!r} in devices.toml ({hint}); --memory 80GiB works for any")


@functools.cache
def all_devices() -> tuple[Device, ...]:
    return tuple(device for device, _ in _read())


@functools.cache
def _by_name() -> dict[str, Device]:
    return {_normalized(name): device for device, aliases in _read() for name in (device.name, *aliases)}


@functools.cache
def _read() -> tuple[tuple[Device, tuple[str, ...]], ...]:
    entries = tomllib.loads(files("llmq.profiles").joinpath("devices.toml").read_text(encoding="utf-8"))["device"]
    return tuple((_device(entry), tuple(entry["aliases"])) for entry in entries)


def _device(entry: dict) -> Device:
    given = {name: value for name, value in entry.items() if name not in ("aliases", "memory_gib", "bandwidth_gb_s")}
    return Device(
        memory_bytes=round(entry["memory_gib"] * 2**30), bandwidth_bytes_per_s=entry["bandwidth_gb_s"] * 1e9, **given
    )


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("amd").removeprefix("instinct")
