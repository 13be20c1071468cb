"""The table of what goes where, against the writers themselves."""

from dataclasses import replace
from itertools import product

import pytest

from llmq.quantize.formats.fp8 import block_scheme
from llmq.quantize.formats.legal import (
    FORMATS,
    LEGAL,
    check_legal,
    check_together,
    default_symmetric,
    legal_formats,
    legal_row,
    loads_experts,
)
from llmq.quantize.formats.registry import WRITERS
from llmq.quantize.formats.scheme import ActivationScheme, FormatError, KVCacheScheme, WeightScheme
from llmq.quantize.recipe import METHODS, LinearSettings

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


SCHEMES += [WeightScheme("int", 4, "group", 32, symmetric, has_column_groups=True) for symmetric in (True, False)]
SCHEMES += [WeightScheme("int", 5, "group", 32, False, has_offset=True)]
SHAPES = [None, (64, 64), (60, 64), (64, 80), (62, 72), (8, 32), (32, 8)]


def refuses(check, *arguments):
    try:
        check(*arguments)
    except FormatError:
        return True
    return False


@pytest.mark.parametrize("name", WRITERS)
def test_the_table_says_what_the_writer_does(name):
    """The table is asked before torch is imported, the writer when it writes."""
    for scheme, shape in product(SCHEMES, SHAPES):
        by_table = refuses(check_legal, scheme, name, shape)
        assert by_table == refuses(WRITERS[name].check, scheme, shape), (scheme.name, shape)
        assert by_table or check_legal(scheme, name, shape).format == name


@pytest.mark.parametrize("name", WRITERS)
def test_the_table_says_what_a_writers_config_does(name):
    usual = next(scheme for scheme in SCHEMES if legal_row(scheme, name) is not None)
    other = next((s for s in SCHEMES if s != usual and legal_row(s, name) is not None), replace(usual, group_size=64))
    kv = KVCacheScheme("float", 8, "tensor", False, True)
    for schemes, kv_scheme in product(([usual], [usual, other]), (None, kv)):
        by_name = dict(zip(("a", "b"), schemes, strict=False))
        by_writer = refuses(WRITERS[name].config, by_name, (), kv_scheme)
        assert by_writer == refuses(lambda s=schemes, k=kv_scheme: check_together(s, name, has_kv_scales=k is not None))


def test_the_table_knows_every_layout_that_is_written():
    assert set(FORMATS) == set(WRITERS)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_in_the_row_of_what_it_makes(method):
    made_by = {"best": {"awq", "gptq"}}.get(method, {method})
    for bits in METHODS[method].bits:
        grouped = {"group_size": 64, "symmetric": False} if METHODS[method].is_grouped else {}
        scheme = LinearSettings.of(method, bits=bits, **grouped).scheme
        assert made_by <= set(check_legal(scheme, "compressed-tensors").methods)


@pytest.mark.parametrize("format_name", FORMATS)
def test_where_nobody_said_there_are_zero_points_if_the_format_and_the_loaders_of_experts_take_them(format_name):
    for bits, has_experts in product((4, 8), (False, True)):
        rows = [row for row in LEGAL if row.format == format_name and "rtn" in row.methods and bits in row.bits]
        if not rows:
            continue
        chosen = default_symmetric(False, bits, format_name, has_experts=has_experts)
        assert chosen in rows[0].symmetric
        scheme = WeightScheme("int", bits, "group", 64, chosen, None, "pack-quantized")
        if has_experts and "vllm" in rows[0].loaders:
            assert loads_experts("vllm", scheme, format_name)
        elif False in rows[0].symmetric:
            assert not chosen


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
