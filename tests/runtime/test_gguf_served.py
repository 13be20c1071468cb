"""A .gguf served in its own blocks: to the bit what gguf-py reads, and through the engine what dense weights give."""

import numpy as np
import pytest
import torch
from engine_driver import greedy, run_all
from gguf_files import TYPES, dequantized, float32_folder, random_blocks, write_llama

from llmq.profiles.checkpoint import find_model, read_checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.gguf_blocks import BLOCK_TYPES, part_chunks
from llmq.profiles.weight_size import weight_size
from llmq.quantize.formats.gguf import SCHEMES, GGUFFormat
from llmq.quantize.formats.registry import format_of
from llmq.quantize.formats.scheme import FormatError

_DTYPES = {"I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F16": torch.float16}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path / "cache"))


def tensors_of(kind: str, data: np.ndarray, width: int, row_order=None) -> dict[str, torch.Tensor]:
    block, made = BLOCK_TYPES[kind], {}
    num_blocks = width // block.elements
    for suffix, part in block.parts.items():
        raw = b"".join(part_chunks(part, data, data.shape[1] // num_blocks, row_order))
        tensor = torch.frombuffer(bytearray(raw), dtype=_DTYPES[part.dtype])
        made[f"a.{suffix}"] = tensor.view(len(data), num_blocks * part.per_block)
    return made


def test_the_two_tables_know_the_same_types():
    assert SCHEMES.keys() == BLOCK_TYPES.keys() == set(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_read_to_the_bit(kind):
    data = random_blocks(kind, 12, 768, np.random.default_rng(1))
    tensors = tensors_of(kind, data, 768)
    checkpoint = GGUFFormat({"a": kind})
    weight = checkpoint.read("a", tensors.__getitem__)
    assert set(checkpoint.tensor_names("a", weight.scheme)) == tensors.keys()
    expected = torch.from_numpy(dequantized(data, kind))
    assert torch.equal(weight.dequantize(), expected)
    assert weight.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(checkpoint.read("a", tensors.__getitem__, (3, 9), (256, 768)).dequantize(), expected[3:9, 256:])
    order = np.random.default_rng(2).permutation(12)
    permuted = GGUFFormat({"a": kind}).read("a", tensors_of(kind, data, 768, order).__getitem__)
    assert torch.equal(permuted.dequantize(), expected[order])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K"])
def test_these_take_no_byte_more_than_in_the_file(kind):
    data = random_blocks(kind, 4, 256, np.random.default_rng(1))
    assert sum(tensor.nbytes for tensor in tensors_of(kind, data, 256).values()) == data.nbytes


def logits(engine, ids):
    tiles = {}
    engine.observe_logits(lambda _, position, made: tiles.update({position: made.clone()}))
    run_all(engine, [ids], greedy(0, prompt_logprobs=0))
    return torch.cat([tiles[position] for position in sorted(tiles)])


MIXES = {
    "Q4_K_M": {"": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"},
    "Q5_K_S": {"": "Q5_K"},
    "Q3_K and Q2_K": {"": "Q3_K", "q_proj": "Q2_K"},
    "Q4_0": {"": "Q4_0", "lm_head": "Q8_0"},
    "Q4_1": {"": "Q4_1"},
    "Q5": {"": "Q5_0", "down_proj": "Q5_1"},
    "Q8_0": {"": "Q8_0"},
}


@pytest.mark.parametrize("name", MIXES)
def test_logits_are_those_of_the_dense_weights(tmp_path, make_engine, name):
    weights = write_llama(tmp_path / "x.gguf", MIXES[name])
    packed = find_model(str(tmp_path / "x.gguf"), keep_blocks=True)
    dense = float32_folder(tmp_path / "dense", weights, packed)
    ids = list(range(5, 60))
    expected = logits(make_engine(dense), ids)
    made = logits(make_engine(packed), ids)
    assert (made - expected).norm() / expected.norm() < 1e-5
    in_bf16 = logits(make_engine(packed, dtype="bf16"), ids)
    converted = logits(make_engine(find_model(str(tmp_path / "x.gguf")), dtype="bf16"), ids)
    assert (in_bf16 - converted).norm() / converted.norm() < 0.05
    assert (
        run_all(make_engine(packed), [ids], greedy(12))[0].token_ids
        == run_all(make_engine(dense), [ids], greedy(12))[0].token_ids
    )


def test_what_stays_and_what_is_counted(tmp_path, make_engine):
    path = tmp_path / "x.gguf"
    write_llama(path, {"": "Q4_K", "v_proj": "Q6_K"}, tied=True)
    config_only = find_model(str(path), config_only=True, keep_blocks=True)
    planned = weight_size(config_only).num_bytes
    folder = find_model(str(path), keep_blocks=True)
    assert folder != config_only
    assert weight_size(folder).num_bytes == planned
    checkpoint = read_checkpoint(folder)
    read = format_of(checkpoint.quantization, checkpoint.tensors.keys())
    assert read.scheme_for("model.layers.0.self_attn.v_proj").name == "int6 g16 symmetric"
    assert read.scheme_for("model.layers.1.mlp.up_proj").name == "int4 g32 asymmetric"
    assert read.scheme_for("model.embed_tokens") is None
    assert checkpoint.tensors["model.embed_tokens.weight"].dtype == "BF16"
    assert find_model(str(path), config_only=True, keep_blocks=True) == folder
    dense = read_checkpoint(find_model(str(path)))
    assert dense.quantization is None
    assert {tensor.dtype for tensor in dense.tensors.values()} == {"BF16"}


@pytest.mark.parametrize("name", MIXES)
def test_what_is_held_is_what_was_planned(tmp_path, make_engine, name):
    write_llama(tmp_path / "x.gguf", MIXES[name])
    planned = weight_size(find_model(str(tmp_path / "x.gguf"), config_only=True, keep_blocks=True)).num_bytes
    engine = make_engine(find_model(str(tmp_path / "x.gguf"), keep_blocks=True), dtype="fp16")
    assert engine.info.weight_bytes == planned


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(FormatError, match="IQ4_XS"):
        GGUFFormat.from_config({"quant_method": "gguf", "modules": {"a": "IQ4_XS"}}, ())


def test_quantizing_a_folder_of_blocks_is_refused(tmp_path):
    """`llmq quantize x.gguf` converts to 16 bit; the folder that serve made is quantized already."""
    from llmq.quantize.preflight import preflight
    from llmq.quantize.recipe import Recipe

    write_llama(tmp_path / "x.gguf", {"": "Q4_K"})
    folder = find_model(str(tmp_path / "x.gguf"), keep_blocks=True)
    with pytest.raises(InputError, match="gguf"):
        preflight(read_checkpoint(folder), Recipe.of("rtn"), tmp_path / "out")
