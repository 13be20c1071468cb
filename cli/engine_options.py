"""The options of an engine as verbs take them: words -> EngineConfig."""

from typing import TYPE_CHECKING, Any

from llmq.profiles.errors import InputError
from llmq.profiles.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from llmq.runtime.config import EngineConfig


def engine_config(
    *, dtype: str, kv_dtype: str, device: str, max_model_len: str, kv_cache_memory: str | None, **others: Any
) -> "EngineConfig":
    """For a model that is not there yet (`model` is empty): a mistyped word is refused before anything is downloaded.

    `others` are EngineConfig's own. Raises InputError.
    """
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import parse_dtype

    check_device(device)
    return EngineConfig(
        model="",
        dtype=parse_dtype("--dtype", dtype),
        kv_dtype=parse_dtype("--kv-dtype", kv_dtype),
        device=device,
        max_model_len=None if max_model_len == "auto" else parse_tokens(max_model_len),
        kv_cache_memory_bytes=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
        **others,
    )


def check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: one of auto, cpu, cuda")
