"""Which scheme goes into which layout, by which methods it is made, and who loads the result."""

from dataclasses import dataclass

from llmq.quantize.formats.registry import WRITERS, writer_for
from llmq.quantize.formats.scheme import FormatError, WeightScheme


@dataclass(frozen=True)
class Legal:
    """One row: schemes of these numbers, signs, extents and inputs, in this format. `loaders` run it packed."""

    format: str
    methods: tuple[str, ...]
    kind: str
    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    symmetric: tuple[bool, ...]
    inputs: str  # "16 bit", or what they are rounded to
    loaders: tuple[str, ...]
    note: str = ""

    def covers(self, scheme: WeightScheme, format_name: str) -> bool:
        return (
            self.format == format_name
            and not scheme.has_offset
            and self.kind == scheme.kind
            and scheme.bits in self.bits
            and scheme.strategy in self.strategies
            and scheme.symmetric in self.symmetric
            and self.inputs == inputs_of(scheme)
        )


_WEIGHT_ONLY = ("rtn", "gptq", "awq")
_ROWS = ("group", "channel")
_BOTH = (True, False)

# Loaders by their own documentation and source (vLLM 0.33, transformers 5.17): see the note of the consumer's proof for
# what was tried.
LEGAL: tuple[Legal, ...] = (
    Legal("compressed-tensors", _WEIGHT_ONLY, "int", (4, 8), _ROWS, _BOTH, "16 bit", ("llmq", "vllm", "transformers")),
    Legal(
        *("compressed-tensors", _WEIGHT_ONLY, "int", (2, 3, 5, 6, 7), _ROWS, _BOTH, "16 bit", ("llmq", "transformers")),
        note="vLLM's packed integers are of 4 and 8 bits",
    ),
    Legal(
        "compressed-tensors",
        *(("smoothquant", "rtn"), "int", (8,), ("channel", "tensor"), _BOTH, "int8", ("llmq", "vllm", "transformers")),
    ),
    Legal(
        "compressed-tensors",
        *(("fp8",), "float", (8,), ("channel", "tensor", "block"), (True,), "fp8", ("llmq", "vllm", "transformers")),
    ),
    Legal(
        "compressed-tensors",
        *(("fp8",), "float", (8,), ("channel", "tensor", "block"), (True,), "16 bit", ("llmq", "vllm", "transformers")),
    ),
    Legal(
        *("compressed-tensors", (), "float", (4,), ("group",), (True,), "16 bit", ("llmq", "vllm", "transformers")),
        note="NVFP4 and MXFP4 are read and written, and no method here makes them",
    ),
    Legal("compressed-tensors", (), "float", (4,), ("group",), (True,), "fp4", ("llmq", "vllm", "transformers")),
    Legal("gptq", _WEIGHT_ONLY, "int", (2, 3, 4, 8), _ROWS, (True,), "16 bit", ("llmq", "vllm", "gptqmodel")),
    Legal("gptq_v2", _WEIGHT_ONLY, "int", (2, 3, 4, 8), _ROWS, _BOTH, "16 bit", ("llmq", "gptqmodel")),
    Legal("awq", _WEIGHT_ONLY, "int", (4,), _ROWS, (False,), "16 bit", ("llmq", "vllm", "transformers", "autoawq")),
    Legal("fp8", ("fp8",), "float", (8,), ("block",), (True,), "fp8", ("llmq", "vllm", "transformers")),
)


def inputs_of(scheme: WeightScheme) -> str:
    """What a linear of this scheme rounds its input to: "16 bit", "int8", "fp8", "fp4"."""
    if scheme.activation is None:
        return "16 bit"
    return {("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "fp4"}[
        scheme.activation.kind, scheme.activation.bits
    ]


def legal_row(scheme: WeightScheme, format_name: str) -> Legal | None:
    return next((row for row in LEGAL if row.covers(scheme, format_name)), None)


def legal_formats(scheme: WeightScheme) -> list[str]:
    """Formats that store `scheme`."""
    return [name for name in WRITERS if legal_row(scheme, name) is not None]


def check_legal(scheme: WeightScheme, format_name: str, shape: tuple[int, int] | None = None) -> Legal:
    """The row of LEGAL that has it. Raises FormatError, naming the formats that do."""
    writer = writer_for(format_name)
    formats = legal_formats(scheme)
    if format_name not in formats:
        instead = f"; --format {' or '.join(formats)} does" if formats else "; no format that llmq writes does"
        raise FormatError(f"--format {format_name} does not store {scheme.name}{instead}")
    writer.check(scheme, shape)
    row = legal_row(scheme, format_name)
    assert row is not None
    return row
