"""Formats by name."""

from llmq.quantize.formats.base import FormatWriter
from llmq.quantize.formats.compressed_tensors import CompressedTensorsWriter
from llmq.quantize.formats.scheme import FormatError

WRITERS: dict[str, FormatWriter] = {writer.name: writer for writer in (CompressedTensorsWriter(),)}


def writer_for(name: str) -> FormatWriter:
    """The writer called `name` (`--format`). Raises FormatError, with the names there are."""
    if name not in WRITERS:
        raise FormatError(f"--format {name}: one of {', '.join(WRITERS)}")
    return WRITERS[name]
