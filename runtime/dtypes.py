"""What "auto" means for a checkpoint on a machine: decided in one place, before anything is loaded. No torch."""

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.runtime.config import EngineConfig
from llmq.runtime.kernels import native, triton_runs, why_absent

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
    """Whether an engine uses kernels of our own: where nothing else is asked for, C++ on a CPU that it is built for,
    and Triton on a GPU (on a CPU where Triton interprets its kernels).

    asked: `--kernels`; device: "cpu" or "cuda". Raises InputError where `native` or `triton` cannot be honoured.
    """
    if asked == "native":
        if device != "cpu":
            raise InputError(f"--kernels native: they are for CPUs, and --device is {device}")
        if native is None:
            raise InputError(f"--kernels native: {why_absent}; --kernels torch runs everywhere")
        if dtype == "fp16":
            raise InputError("--kernels native: they compute in bf16 (and attend in fp32), and --dtype is fp16")
        return True
    if asked == "triton" and not triton_runs(device):
        lack = "they are for GPUs, and --device is cpu" if device == "cpu" else "triton is not installed here"
        raise InputError(f"--kernels triton: {lack}; --kernels torch runs everywhere")
    return asked != "torch" and (triton_runs(device) or (device == "cpu" and native is not None))


_HEAD_GROUP = 64


@dataclass(frozen=True)
class NativeNumerics:
    """What our own kernels on a CPU do to a checkpoint's numbers that the checkpoint does not ask for."""

    int8_head: bool = False  # a head stored in 16 bit is rounded to int8, with one scale a row or a group of it
    # Inputs of integer weights are rounded to int8, with one scale a group of the weight; and what an integer KV-cache
    # is multiplied with, queries and the softmax's weights, with one a row.
    int8_activations: bool = False

    def head_group_size(self, in_features: int) -> int | None:
        """Of an int8 head; None: it has one scale a row. A hidden state has outliers, which rounded with one scale cost
        the others more than all the layers' rounding: where inputs are rounded the head has groups."""
        return _HEAD_GROUP if self.int8_activations and in_features % _HEAD_GROUP == 0 else None


def native_numerics(checkpoint: Checkpoint, engine: EngineConfig, dtypes: Dtypes, device: str) -> NativeNumerics | None:
    """None: our own kernels do not run. device: "cpu" or "cuda". Raises InputError for what cannot be honoured.

    `--head auto` is int8 where the layers' weights are quantized, whose error hides that of the head, and 16 bit where
    they are not; `--activations auto` is exact. (The README has what each costs in perplexity and divergence.)
    """
    is_native = runs_native(engine.kernels, dtypes.dtype, device)
    is_quantized = checkpoint.quantization is not None
    is_on_cpu = is_native and device == "cpu" and native is not None
    multiplies = is_on_cpu and dtypes.dtype == "bf16" and checkpoint.architecture.family is not None
    for flag, asked in (("--head", engine.head), ("--activations", engine.activations)):
        if asked == "int8" and not multiplies:
            raise InputError(
                f"{flag} int8: native kernels do that, on a CPU, of a decoder of llmq's own in bf16 (see llmq doctor)"
            )
    if engine.head != "auto" and not checkpoint.has_float_head:
        raise InputError(f"--head {engine.head}: the checkpoint's head is quantized, and runs as it is stored")
    if engine.activations == "int8" and not is_quantized:
        raise InputError("--activations int8: integer weights multiply them, and the checkpoint's are in 16 bit")
    if not is_native:
        return None
    return NativeNumerics(
        int8_head=multiplies
        and checkpoint.has_float_head
        and (engine.head == "int8" or (engine.head == "auto" and is_quantized)),
        int8_activations=engine.activations == "int8",
    )


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
