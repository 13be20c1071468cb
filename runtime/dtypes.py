"""What "auto" means for a checkpoint: dtypes decided in one place, before anything is loaded. No torch."""

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from llmq.profiles.errors import InputError
from llmq.runtime.config import EngineConfig

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
    has_static_kv_scales: bool  # FP8 KV by the scales that the checkpoint stores, one for K and one for V of a layer

    @classmethod
    def of(cls, architecture_dtype: str, quantization: dict[str, Any] | None, engine: EngineConfig) -> "Dtypes":
        """`--dtype auto` is the checkpoint's own; `--kv-dtype auto` is FP8 where the checkpoint stores calibrated FP8
        scales for its KV-cache, else the dtype of the activations."""
        dtype = engine.dtype if engine.dtype != "auto" else _LONG_NAMES.get(architecture_dtype, "fp32")
        calibrated = _is_calibrated_fp8((quantization or {}).get("kv_cache_scheme"))
        kv_dtype = engine.kv_dtype
        if kv_dtype == "auto":
            kv_dtype = "fp8" if calibrated else dtype
        return cls(dtype, kv_dtype, calibrated and kv_dtype == "fp8")


def _is_calibrated_fp8(scheme: dict[str, Any] | None) -> bool:
    """Whether a compressed-tensors `kv_cache_scheme` is e4m3 with one stored scale a layer for K and for V."""
    return (
        bool(scheme)
        and scheme.get("type") == "float"
        and scheme.get("num_bits") == 8
        and not scheme.get("dynamic")
        and (scheme.get("strategy") or "tensor") == "tensor"
    )
