"""Engines whose native kernels round a head or activations: what they say of it, what they hold, and how far it is."""

import json
import shutil

import pytest
import torch
from engine_driver import greedy, run_all
from random_weights import make, quantize_folder
from safetensors.torch import load_file, save_file

from llmq.profiles.checkpoint import read_checkpoint
from llmq.quantize.formats.compressed_tensors import ConfigGroup, QuantizationConfig, to_tensors
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.rounding import quantize_weight
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes, NativeNumerics, native_numerics
from llmq.runtime.kernels import native, why_absent
from llmq.runtime.layers import native_linear
from llmq.runtime.layers.native_linear import NativeLinear
from llmq.runtime.memory import weight_bytes

pytestmark = pytest.mark.skipif(native is None, reason=f"no native kernels here: {why_absent}")

PROMPTS = [[(37 * position + 11 * row) % 300 + 3 for position in range(50)] for row in range(3)]


def logits_of(engine):
    seen = {}
    engine.observe_logits(lambda name, at, rows: seen.setdefault(name, []).append(rows.clone()))
    run_all(engine, PROMPTS, greedy(0, prompt_logprobs=0))
    return torch.cat([torch.cat(seen[str(index)]) for index in range(len(PROMPTS))])


def distance(made, expected):
    return float((made - expected).norm() / expected.norm())


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_int8_is_near_the_one_in_16_bit(make_engine, tiny_llama, tied):
    folder = tiny_llama(dtype="bfloat16", tie_word_embeddings=tied)
    plain, rounded = (make_engine(folder, dtype="bf16", head=head) for head in ("auto", "int8"))
    suffix = ", tied" if tied else ""
    assert plain.info.fingerprint["head"] == f"bf16{suffix}"
    assert rounded.info.fingerprint["head"] == f"int8 per row{suffix}"
    assert plain.info.fingerprint["linear_kernels"] == rounded.info.fingerprint["linear_kernels"]
    assert 1e-4 < distance(logits_of(rounded), logits_of(plain)) < 2e-2


@pytest.mark.parametrize("head", ["16bit", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_held_is_what_is_planned_with(make_engine, tiny_llama, tied, head):
    folder = tiny_llama(dtype="bfloat16", tie_word_embeddings=tied)
    config = EngineConfig(model=str(folder), head=head)
    stored, dtypes = read_checkpoint(folder), Dtypes("bf16", "bf16", False)
    planned = weight_bytes(stored, dtypes, native_numerics(stored, config, dtypes, "cpu"))
    assert make_engine(folder, dtype="bf16", head=head).info.weight_bytes == planned


def test_of_a_quantized_checkpoint(make_engine, shared):
    """The head is rounded unless it is said otherwise, activations where it is said; each by a little."""
    folder = shared / "interop" / "autogptq-w4g128-sym"
    as_stored = make_engine(folder, dtype="bf16", head="16bit")
    rounded = make_engine(folder, dtype="bf16")
    both = make_engine(folder, dtype="bf16", activations="int8")
    assert [engine.info.fingerprint["head"] for engine in (as_stored, rounded, both)] == [
        "bf16",
        "int8 per row",
        "int8 × int8 in groups of 64",
    ]
    isa = native.isa()
    assert as_stored.info.fingerprint["linear_kernels"] == f"native int4, {isa}"
    assert both.info.fingerprint["linear_kernels"] == f"native int4 × int8, {isa}"
    expected = logits_of(as_stored)
    assert 1e-4 < distance(logits_of(rounded), expected) < 2e-2
    assert 1e-3 < distance(logits_of(both), expected) < 6e-2


@pytest.mark.parametrize(
    ("format_name", "model_type"), [("compressed-tensors", "llama"), ("gptq", "llama"), ("gptq", "mixtral")]
)
def test_three_bits_are_held_in_three_and_give_the_logits_of_four(
    make_engine, tiny_llama, tmp_path, monkeypatch, format_name, model_type
):
    source = tiny_llama(dtype="bfloat16", model_type=model_type)
    folder = quantize_folder(
        source,
        tmp_path / "w3",
        format_name,
        lambda out, in_, seed: make("int", 3, "group", out, in_, seed, group_size=32),
    )
    numbers = []

    def engine_and_logits():
        made, inner = [], NativeLinear.__init__
        with monkeypatch.context() as patch:
            patch.setattr(NativeLinear, "__init__", lambda self, *given: made.append(self) or inner(self, *given))
            engine = make_engine(folder, dtype="bf16", head="16bit")
        numbers.append(sum(one.tensors["numbers"].nbytes for one in made if one.packed_facts["numbers"] != "bf16"))
        assert engine.info.fingerprint["program"] == "native"
        return engine, logits_of(engine)

    three, logits = engine_and_logits()
    monkeypatch.setattr(native_linear, "held_bits", lambda bits: 4)
    four, expected = engine_and_logits()
    for engine, held, other in ((three, "int3", "int4"), (four, "int4", "int3")):
        kernels = engine.info.fingerprint["linear_kernels"]
        assert f"native {held}, {native.isa()}" in kernels
        assert other not in kernels
    assert torch.equal(logits, expected)
    assert numbers[0] * 4 == numbers[1] * 3
    assert four.info.weight_bytes - three.info.weight_bytes == numbers[1] - numbers[0]


@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (3, True), (3, False), (4, False), (6, True)])
def test_any_bits_run_natively_and_are_counted_as_held(make_engine, tiny_llama, tmp_path, bits, symmetric):
    """The packed integers give the logits of their values written out, and take the bytes that were planned with."""
    source = tiny_llama(dtype="bfloat16")
    scheme = WeightScheme("int", bits, "group", 32, symmetric, None, "pack-quantized")
    packed, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        packed[name] = plain[name] = tensor
        if ".layers." in name and tensor.dim() == 2:
            weight = quantize_weight(tensor.float(), scheme, torch.bfloat16)
            del packed[name]
            packed |= to_tensors(name.removesuffix(".weight"), weight)
            plain[name] = weight.dequantize(torch.bfloat16)
    section = QuantizationConfig((ConfigGroup(("Linear",), scheme),), ("lm_head",)).to_config()
    made = []
    for kind, tensors, extra in (("packed", packed, {"quantization_config": section}), ("plain", plain, {})):
        folder = shutil.copytree(source, tmp_path / kind)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
        engine = make_engine(folder, dtype="bf16", head="16bit")
        made.append(logits_of(engine))
        assert engine.info.fingerprint["program"] == "native"
        stored, dtypes = read_checkpoint(folder), Dtypes("bf16", "bf16", False)
        # Of a packed linear its shape is stored too, in 16 bytes.
        shapes = sum(name.endswith("weight_shape") for name in tensors)
        assert engine.info.weight_bytes + 16 * shapes == weight_bytes(stored, dtypes, NativeNumerics())
    assert distance(*made) < 2e-2
