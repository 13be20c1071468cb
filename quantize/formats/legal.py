"""Which scheme goes into which layout, by which methods it is made, and who loads the result: no tensors, no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from llmq.quantize.formats.scheme import FormatError, WeightScheme


@dataclass(frozen=True)
class Legal:
    """One row: schemes of these numbers, signs, extents and inputs, in this format. `loaders` run it packed."""

    format: str
    methods: tuple[str, ...]  # of ours that make it; none: it is read, and written back
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
            and (self.format in _IN_ACTIVATION_ORDER or not scheme.has_column_groups)
            and self.kind == scheme.kind
            and scheme.bits in self.bits
            and scheme.strategy in self.strategies
            and scheme.symmetric in self.symmetric
            and self.inputs == inputs_of(scheme)
        )

    @property
    def words(self) -> str:
        """What it stores: `integers of 4 bits with zero points, a scale a group or channel (--bits 4 --asym)`."""
        numbers = f"{'integers' if self.kind == 'int' else 'floats'} of {_listed(map(str, self.bits))} bits"
        if self.kind == "int" and len(self.symmetric) == 1:
            numbers += " without zero points" if self.symmetric[0] else " with zero points"
        inputs = "" if self.inputs == "16 bit" else f", inputs in {self.inputs}"
        return f"{numbers}, a scale a {_listed(self.strategies)}{inputs}" + (f" ({self.note})" if self.note else "")


_IN_ACTIVATION_ORDER = ("compressed-tensors", "gptq", "gptq_v2")
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
        *(("smoothquant",), "int", (8,), ("channel", "tensor"), _BOTH, "int8", ("llmq", "vllm", "transformers")),
    ),
    Legal(
        "compressed-tensors",
        *(("fp8",), "float", (8,), ("channel", "tensor", "block"), (True,), "fp8", ("llmq", "vllm", "transformers")),
    ),
    Legal(
        "compressed-tensors",
        *((), "float", (8,), ("channel", "tensor", "block"), (True,), "16 bit", ("llmq", "vllm", "transformers")),
    ),
    Legal(
        *("compressed-tensors", (), "float", (4,), ("group",), (True,), "16 bit", ("llmq", "vllm", "transformers")),
        note="NVFP4 and MXFP4 are read and written, and no method here makes them",
    ),
    Legal("compressed-tensors", (), "float", (4,), ("group",), (True,), "fp4", ("llmq", "vllm", "transformers")),
    Legal(
        *("gptq", _WEIGHT_ONLY, "int", (2, 3, 4, 8), _ROWS, (True,), "16 bit", ("llmq", "vllm", "gptqmodel")),
        note="--sym: it stores zero points less one, and so has none for 0",
    ),
    Legal("gptq_v2", _WEIGHT_ONLY, "int", (2, 3, 4, 8), _ROWS, _BOTH, "16 bit", ("llmq", "gptqmodel")),
    Legal(
        *("awq", _WEIGHT_ONLY, "int", (4,), _ROWS, (False,), "16 bit", ("llmq", "vllm", "transformers", "autoawq")),
        note="--bits 4 --asym",
    ),
    Legal(
        *("fp8", ("fp8",), "float", (8,), ("block",), (True,), "fp8", ("llmq", "vllm", "transformers")),
        note="--fp8-scheme block",
    ),
)
FORMATS = tuple(dict.fromkeys(row.format for row in LEGAL))
_WITH_KV_SCALES = ("compressed-tensors",)
_OF_ONE_SCHEME = ("awq", "fp8")


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
    return [name for name in FORMATS if legal_row(scheme, name) is not None]


def check_legal(scheme: WeightScheme, format_name: str, shape: tuple[int, int] | None = None) -> Legal:
    """The row of LEGAL that has it, in linears of an [out, in] shape. Raises FormatError that names who does."""
    if format_name not in FORMATS:
        raise FormatError(f"--format {format_name}: one of {', '.join(FORMATS)} is expected")
    row, formats = legal_row(scheme, format_name), legal_formats(scheme)
    if row is None:
        instead = f"--format {_listed(formats)} does" if formats else "no format that llmq writes does"
        stored = "; ".join(one.words for one in LEGAL if one.format == format_name and one.methods)
        raise FormatError(f"--format {format_name} does not store {scheme.name}; {instead}. It stores {stored}")
    steps = _steps(row, scheme)
    if shape is not None and any(side % step for side, step in zip(shape, steps, strict=True)):
        raise FormatError(
            f"--format {format_name} does not store a [{shape[0]}, {shape[1]}] weight in {scheme.name}: its outputs "
            f"must be a multiple of {steps[0]}, its inputs of {steps[1]}"
        )
    return row


def loads_experts(loader: str, scheme: WeightScheme, format_name: str) -> bool:
    """Whether a loader of a row runs it as the experts of a mixture too, by its source: transformers 5.17 puts an
    expert's tensors into one (`DecompressExperts`), vLLM 0.33 has kernels of their own for them.
    """
    if loader == "transformers":
        is_packed = scheme.layout == "pack-quantized" and scheme.kind == "int" and scheme.symmetric
        is_plain_fp8 = (scheme.kind, scheme.bits) == ("float", 8) and scheme.strategy in ("channel", "tensor")
        return format_name == "compressed-tensors" and (is_packed or is_plain_fp8)
    if loader == "vllm":
        return format_name == "awq" or (scheme.symmetric and scheme.bits in (4, 8))
    return True


def default_symmetric(preferred: bool, bits: int, format_name: str, *, has_experts: bool) -> bool:
    """Whether weights of a method that prefers zero points (False) or none (True) get none where nobody said.

    So where the format stores no other integers of `bits`, and in compressed-tensors in a mixture, whose other loaders
    take experts without zero points alone; the linears beside them too, for transformers looks for one scheme.
    """
    if has_experts and format_name == "compressed-tensors":
        return True
    stored = {
        symmetric
        for row in LEGAL
        if (row.format, row.kind, row.inputs) == (format_name, "int", "16 bit") and bits in row.bits
        for symmetric in row.symmetric
    }
    return preferred if preferred in stored or not stored else not preferred


def check_together(schemes: Iterable[WeightScheme], format_name: str, *, has_kv_scales: bool) -> None:
    """Raise FormatError where a format has no place for scales of the KV-cache, or one scheme for all linears alone."""
    if has_kv_scales and format_name not in _WITH_KV_SCALES:
        raise FormatError(
            f"--format {format_name} has no place for scales of the KV-cache: --format {_listed(_WITH_KV_SCALES)} has"
        )
    if format_name in _OF_ONE_SCHEME and len(different := dict.fromkeys(schemes)) > 1:
        names = ", ".join(scheme.name for scheme in different)
        raise FormatError(
            f"--format {format_name} has one scheme for all linears, not {names}: compressed-tensors has more"
        )


def _steps(row: Legal, scheme: WeightScheme) -> tuple[int, int]:
    """What outputs and inputs must be multiples of: of whole groups, and of whole words of packed numbers."""
    group = scheme.group_size if scheme.strategy == "group" else 1
    if row.format == "awq":
        return 8, group
    if row.format in ("gptq", "gptq_v2"):
        a_word = 32 // math.gcd(32, scheme.bits)
        return a_word, math.lcm(a_word, group)
    return 1, group


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
