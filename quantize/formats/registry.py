"""Formats by name: the one that reads a folder's quantization, the one that `--format` writes."""

from collections.abc import Callable, Collection
from typing import Any

from llmq.quantize.formats.awq import AWQFormat, AWQWriter
from llmq.quantize.formats.base import CheckpointFormat, FormatWriter
from llmq.quantize.formats.compressed_tensors import CompressedTensorsWriter, QuantizationConfig
from llmq.quantize.formats.fp8 import FP8Format, FP8Writer
from llmq.quantize.formats.gguf import GGUFFormat
from llmq.quantize.formats.gptq import GPTQFormat, GPTQWriter
from llmq.quantize.formats.scheme import FormatError

# quant_method -> reader of (config, names of the tensors that are stored)
READERS: dict[str, Callable[[dict[str, Any], Collection[str]], CheckpointFormat]] = {
    "compressed-tensors": lambda config, names: QuantizationConfig.from_config(config),
    "gptq": GPTQFormat.from_config,
    "awq": AWQFormat.from_config,
    "fp8": FP8Format.from_config,
    "gguf": GGUFFormat.from_config,
}

WRITERS: dict[str, FormatWriter] = {
    writer.name: writer
    for writer in (CompressedTensorsWriter(), GPTQWriter("gptq"), GPTQWriter("gptq_v2"), AWQWriter(), FP8Writer())
}


def format_of(quantization: dict[str, Any], tensor_names: Collection[str]) -> CheckpointFormat:
    """The format of a checkpoint by its `quantization_config` (or quantize_config.json) and the names of its tensors.

    Raises FormatError for what is not read or cannot be honoured, by name.
    """
    method = quantization.get("quant_method")
    if method not in READERS:
        raise FormatError(f"quantization_config: quant_method {method!r} is not supported ({', '.join(READERS)} are)")
    return READERS[method](quantization, tensor_names)


def writer_for(name: str) -> FormatWriter:
    """The writer called `name` (`--format`). Raises FormatError, with the names there are."""
    if name not in WRITERS:
        raise FormatError(f"--format {name}: one of {', '.join(WRITERS)}")
    return WRITERS[name]
