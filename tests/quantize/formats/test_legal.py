"""The table of what goes where, against the writers themselves."""

from itertools import product

import pytest

from llmq.quantize.formats.fp8 import block_scheme
from llmq.quantize.formats.legal import LEGAL, check_legal, legal_formats, legal_row
from llmq.quantize.formats.registry import WRITERS
from llmq.quantize.formats.scheme import ActivationScheme, FormatError, WeightScheme

INT8, FP8 = ActivationScheme("int"), ActivationScheme("float")
SCHEMES = [
    WeightScheme("int", bits, strategy, 32 if strategy == "group" else None, symmetric)
    for bits, strategy, symmetric in product((2, 3, 4, 5, 6, 7, 8), ("group", "channel"), (True, False))
]
SCHEMES += [WeightScheme("int", 8, "channel", None, True, INT8, "int-quantized")]
SCHEMES += [WeightScheme("float", 8, s, None, True, FP8, "float-quantized") for s in ("channel", "tensor")]
SCHEMES += [block_scheme()]
SCHEMES += [
    WeightScheme("float", 4, "group", size, activation=activation)
    for size in (16, 32)
    for activation in (None, ActivationScheme("float", 4, group_size=size))
]


@pytest.mark.parametrize("name", WRITERS)
def test_the_table_says_what_the_writer_does(name):
    for scheme in SCHEMES:
        try:
            WRITERS[name].check(scheme)
        except FormatError:
            assert legal_row(scheme, name) is None, scheme.name
        else:
            assert check_legal(scheme, name).format == name


def test_every_row_is_of_some_scheme():
    weight_only_fp8 = WeightScheme("float", 8, "channel", None, True, None, "float-quantized")
    for row in LEGAL:
        assert any(row.covers(scheme, row.format) for scheme in [*SCHEMES, weight_only_fp8]), row


@pytest.mark.parametrize(
    ("scheme", "format_name", "message"),
    [
        (WeightScheme("int", 3, "group", 64, False), "awq", "compressed-tensors or gptq_v2"),
        (WeightScheme("int", 4, "group", 64, False), "gptq", "gptq_v2 or awq"),
        (WeightScheme("float", 8, "channel", None, True, FP8, "float-quantized"), "fp8", "compressed-tensors"),
        (WeightScheme("int", 4, "group", 32, False, has_offset=True), "awq", "no format that llmq writes"),
        (WeightScheme("int", 4, "group", 64), "gguf", "--format gguf"),
    ],
)
def test_what_is_not_legal_is_refused_with_what_is(scheme, format_name, message):
    with pytest.raises(FormatError, match=message):
        check_legal(scheme, format_name)


def test_who_loads_three_bits():
    three = WeightScheme("int", 3, "group", 64)
    assert legal_formats(three) == ["compressed-tensors", "gptq", "gptq_v2"]
    assert "vllm" not in check_legal(three, "compressed-tensors").loaders
    assert "vllm" in check_legal(WeightScheme("int", 4, "group", 64), "compressed-tensors").loaders
