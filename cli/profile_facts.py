"""A model's work and a GPU's rates, as `profile` and `bench` ask for them."""

from pathlib import Path
from typing import TYPE_CHECKING

from llmq.profiles.errors import InputError

if TYPE_CHECKING:
    from llmq.profiles.roofline import DecoderWork, Machine


def decoder_work(
    path: Path, weights: str | None = None, kv_dtype: str = "auto", tp: int = 1, *, is_run: bool = False
) -> "tuple[DecoderWork, str, str]":
    """(the model's work, the KV dtype, the dtype of products) as `llmq serve` would hold it. `is_run`: it shall run
    here, so that a decoder which the runtime does not run is refused."""
    from llmq.cli.engine_options import valid_ranks
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.checkpoint import has_weights, read_checkpoint, read_config, read_quantization
    from llmq.profiles.kv_spec import KVCacheLayout
    from llmq.profiles.roofline import DecoderWork
    from llmq.profiles.weight_size import weight_size
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import Dtypes, native_numerics, parse_dtype
    from llmq.runtime.memory import packed_head_bytes

    config = read_config(path)
    architecture = ModelArchitecture.from_config(config)
    if is_run:
        architecture.require_runnable()
    engine = EngineConfig(model=str(path), kv_dtype=parse_dtype("--kv-dtype", kv_dtype))
    dtypes = Dtypes.of(architecture.dtype, read_quantization(path, config), engine)
    valid_ranks(architecture, config, read_quantization(path, config), weights, asked=tp)
    layout = KVCacheLayout.of(
        architecture, dtypes.kv_dtype, tensor_parallel=tp, dynamic_scales=not dtypes.has_static_kv_scales
    )
    is_stored = weights is None and has_weights(path)
    if is_stored:
        checkpoint = read_checkpoint(path)
        num_bytes = checkpoint.held_bytes(dtypes.float_bytes)
        if is_run:
            numerics = native_numerics(checkpoint, engine, dtypes, "cpu")
            head = packed_head_bytes(checkpoint, dtypes, numerics)
            if head is not None:  # which is read instead of what is stored
                num_bytes += head - 2 * architecture.vocab_size * architecture.hidden_size
    else:
        num_bytes = weight_size(path, weights).num_bytes
    return DecoderWork.of(config, layout, num_bytes, tp), dtypes.kv_dtype, dtypes.dtype


def datasheet(gpu: str, weights: str | None = None) -> "Machine":
    from llmq.profiles.devices import find_device
    from llmq.profiles.plan import machine_of

    machine = machine_of(find_device(gpu), weights)
    if machine is None:
        raise InputError(f"--gpu {gpu}: devices.toml has no rates of it")
    return machine
