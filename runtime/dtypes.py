"""What "auto" means for a checkpoint on a machine: decided in one place, before anything is loaded. No torch."""

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from llmq.profiles.errors import InputError
from llmq.runtime.config import EngineConfig
from llmq.runtime.kernels import native, why_absent

_LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def parse_dtype(flag: str, name: str) -> str:
    """The value of --dtype or --kv-dtype in EngineConfig's words; torch's long names are understood too."""
    field = "kv_dtype" if "kv" in flag else "dtype"
    allowed = get_args(get_type_hints(EngineConfig)[field])
    short = _LONG_NAMES.get(name, name)
    if short not in allowed:
        raise InputError(f"{flag} {name}: one of {', '.join(allowed)}")
    return short


@dataclass(frozen=True)
class Dtypes:
    dtype: str  # of activations and unquantized weights
    kv_dtype: str
    has_static_kv_scales: bool  # of the checkpoint, one for K and one for V of a layer; else computed as it runs

    @property
    def float_bytes(self) -> int:
        """Of an activation, and of an unquantized weight."""
        return 4 if self.dtype == "fp32" else 2

    @classmethod
    def of(cls, architecture_dtype: str, quantization: dict[str, Any] | None, engine: EngineConfig) -> "Dtypes":
        """`--dtype auto` is the checkpoint's own; `--kv-dtype auto` is what the checkpoint's `kv_cache_scheme` asks
        for, else the dtype of the activations. Raises InputError, by name, for a scheme that is not run, unless
        `--kv-dtype` overrules it."""
        dtype = engine.dtype if engine.dtype != "auto" else _LONG_NAMES.get(architecture_dtype, "fp32")
        scheme = (quantization or {}).get("kv_cache_scheme")
        asked = _kv_dtype_of(scheme) if scheme else dtype
        if engine.kv_dtype == "auto" and asked is None:
            raise InputError(
                f"the checkpoint's kv_cache_scheme ({_describe(scheme)}) is not one that the runtime runs (symmetric 8 "
                "bits, dynamic or with one stored scale a layer for K and for V, are): say --kv-dtype bf16, or "
                "--kv-dtype fp8 or int8 for scales computed as it runs"
            )
        kv_dtype = asked if engine.kv_dtype == "auto" else engine.kv_dtype
        return cls(dtype, kv_dtype, bool(scheme) and asked == kv_dtype and not scheme.get("dynamic"))


def runs_native(asked: str, dtype: str, device: str) -> bool:
    """Whether an engine uses kernels of our own: where it is not asked for, on a CPU that they are built for.

    asked: `--kernels`; device: "cpu" or "cuda". Raises InputError where `native` cannot be honoured.
    """
    if asked == "native":
        if device != "cpu":
            raise InputError(f"--kernels native: they are for CPUs, and --device is {device}")
        if native is None:
            raise InputError(f"--kernels native: {why_absent}; --kernels torch runs everywhere")
        if dtype == "fp16":
            raise InputError("--kernels native: they compute in bf16 (and attend in fp32), and --dtype is fp16")
    return asked != "torch" and device == "cpu" and native is not None


def _kv_dtype_of(scheme: dict[str, Any] | str) -> str | None:
    """The KV dtype of a compressed-tensors `kv_cache_scheme`; None where the runtime has none that honours it."""
    if not isinstance(scheme, dict) or scheme.get("num_bits") != 8 or not scheme.get("symmetric", True):
        return None
    if not scheme.get("dynamic") and (scheme.get("strategy") or "tensor") != "tensor":
        return None
    return {"float": "fp8", "int": "int8"}.get(scheme.get("type", "float"))


def _describe(scheme: dict[str, Any] | str) -> str:
    if not isinstance(scheme, dict):
        return repr(scheme)
    when, sign = (
        "dynamic" if scheme.get("dynamic") else "static",
        "" if scheme.get("symmetric", True) else "asymmetric ",
    )
    number = f"{scheme.get('type', 'float')}{scheme.get('num_bits')}"
    return f"{sign}{number}, {when} per {scheme.get('strategy') or 'tensor'}"
