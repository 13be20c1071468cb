"""A GGUF written here from known weights, as llama.cpp's converter writes it, comes back as those weights."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmq.profiles import gguf_convert
from llmq.profiles.checkpoint import find_model, read_checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.gguf_convert import read_gguf
from llmq.profiles.gguf_weights import to_bf16
from llmq.profiles.weight_size import weight_size

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path / "cache"))


def gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def permute(weights: np.ndarray, n_head: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute, word for word."""
    return (
        weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    folder: Path,
    path: Path,
    *,
    arch: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fields: dict | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write the model of `folder` to `path`; return what its tensors hold after rounding, under their HF names."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(vocabulary))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    for key, value in (fields or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    rounded = {}
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        values = tensor.numpy()
        kind = quantization if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(values, kind)
        rounded[name] = gguf.quants.dequantize(stored, kind)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            stored = permute(stored, heads)  # rows are quantized one by one: the same before as after
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": False}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": False}),
    ],
)
def test_weights_come_back_to_the_bit_and_transformers_computes_the_same(tmp_path, tiny_llama, model_type, changes):
    source = tiny_llama(model_type=model_type, **changes)
    rounded = write_gguf(source, tmp_path / "tiny.gguf", arch=model_type)

    folder = find_model(str(tmp_path / "tiny.gguf"))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    assert rounded.keys() == {name for name in state if name != "lm_head.weight" or "lm_head.weight" in rounded}
    for name, values in rounded.items():
        assert torch.equal(state[name], torch.from_numpy(values).bfloat16()), name

    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ids = torch.tensor([[1, 17, 300, 42, 5]])
    assert torch.equal(model(ids).logits, original(ids).logits)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "BF16", "F16"])
def test_quantized_rows_are_permuted_as_they_lie(tmp_path, tiny_llama, kind):
    source = tiny_llama()
    kind = gguf.GGMLQuantizationType[kind]
    rounded = write_gguf(source, tmp_path / "tiny.gguf", quantization=kind)
    state = AutoModelForCausalLM.from_pretrained(find_model(str(tmp_path / "tiny.gguf")), dtype="auto").state_dict()
    for name, values in rounded.items():
        assert torch.equal(state[name], torch.from_numpy(values.copy()).bfloat16()), name


def test_tokenizer_template_and_end_tokens_come_along(tmp_path, tiny_llama):
    source = tiny_llama()
    write_gguf(source, tmp_path / "tiny.gguf", fields={"tokenizer.ggml.eot_token_id": 0})
    folder = find_model(str(tmp_path / "tiny.gguf"))

    ours, original = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(source)
    text = "Once upon a time — 1234 🦙\n\n\tI'll <|im_end|>be there.  日本"
    assert ours(text).input_ids == original(text).input_ids
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_a_conversion_is_made_once_and_again_when_the_file_changes(tmp_path, tiny_llama, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(), path)
    seen = []
    first = find_model(str(path), progress=lambda stage, done, total, *, unit="": seen.append((done, total, unit)))
    assert seen[-1] == (read_checkpoint(first).total_bytes,) * 2 + ("B",)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "convert", None)
        assert find_model(str(path)) == first
        assert find_model(str(path), config_only=True) == first

    write_gguf(tiny_llama(model_type="qwen3"), path, arch="qwen3")
    second = find_model(str(path))
    assert second != first
    assert read_checkpoint(second).config["model_type"] == "qwen3"


def test_config_only_converts_no_weights(tmp_path, tiny_llama):
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    folder = find_model(str(tmp_path / "tiny.gguf"), config_only=True)
    assert not list(folder.glob("*.safetensors"))
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2


def test_the_weights_of_a_file_are_its_blocks_to_the_byte(tmp_path, tiny_llama):
    """`kv-budget FILE.gguf` reads the tensor infos alone: linears as they lie, what is unpacked in 16 bit."""
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(hidden_size=64, intermediate_size=128), path, quantization=gguf.GGMLQuantizationType.Q8_0)
    size = weight_size(find_model(str(path), config_only=True, keep_blocks=True))
    assert size.how == "as stored"
    stored = read_checkpoint(find_model(str(path), keep_blocks=True))
    assert size.num_bytes == stored.total_bytes
    linears = [one for one in read_gguf(path).tensors.values() if one.dtype == "Q8_0"]
    assert linears
    assert size.num_bytes >= sum(one.num_bytes for one in linears)


def test_large_models_are_sharded(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setattr(gguf_convert, "_SHARD_BYTES", 50_000)
    rounded = write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    folder = find_model(str(tmp_path / "tiny.gguf"))
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert read_checkpoint(folder).tensors.keys() == rounded.keys()
    state = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(state[name], torch.from_numpy(values).bfloat16()) for name, values in rounded.items())


def test_an_interrupted_conversion_leaves_nothing(tmp_path, tiny_llama):
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf")

    def interrupt(stage, done, total, *, unit=""):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_model(str(tmp_path / "tiny.gguf"), progress=interrupt)
    assert [path.name for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arch": "gemma2"},
            r"GGUF architecture 'gemma2' is not one that llmq converts \(llama, qwen2, qwen3, gemma3\)",
        ),
        ({"fields": {"tokenizer.ggml.pre": "deepseek-v3"}}, "GGUF pre-tokenizer 'deepseek-v3' is not one"),
        ({"fields": {"llama.expert_count": 8}}, "mixture of 8 experts"),
        ({"fields": {"llama.rope.scaling.type": "longrope"}}, "RoPE scaling 'longrope'"),
        ({"extra_tensors": {"blk.0.ssm_in.weight": np.zeros((4, 4), np.float32)}}, r"blk\.0\.ssm_in\.weight"),
        ({"extra_tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope_freqs tensor of this GGUF is not"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused_by_name(tmp_path, tiny_llama, changes, message, monkeypatch):
    # The library refuses to write a key twice: the later value is the one under test.
    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", _last_value_wins)
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", **changes)
    with pytest.raises(InputError, match=message):
        find_model(str(tmp_path / "tiny.gguf"))


def _last_value_wins(writer, key, value, kind, sub_type=None):
    writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value=value, type=kind, sub_type=sub_type)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"not a model", "is no GGUF file"),
        (b"GGUF\x01\0\0\0" + bytes(16), "GGUF version 1 is not one"),
    ],
)
def test_a_file_that_is_no_gguf(tmp_path, content, message):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(InputError, match=message):
        find_model(str(tmp_path / "x.gguf"))


def test_a_file_cut_anywhere_is_refused(tmp_path, tiny_llama):
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    for size in [5, 30, *range(100, len(content), len(content) // 40), len(content) - 1]:
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(InputError, match="cut short"):
            find_model(str(tmp_path / "cut.gguf"))


def test_bf16_rounds_to_nearest_even_as_torch_does():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    halves = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0], np.uint32)
    values = np.concatenate([bits, halves]).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_bf16(values), expected)
    (not_a_number,) = to_bf16(np.array([np.nan], np.float32))
    assert not_a_number & 0x7F80 == 0x7F80  # exponent of all ones, and a mantissa that is not zero
    assert not_a_number & 0x7F


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_s_rope_factors_are_those_of_transformers(factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from llmq.profiles.gguf_config import llama3_rope_factors

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    parameters = {**scaling, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=parameters)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(llama3_rope_factors(scaling, 500000.0, 128), plain / inverse.numpy(), rtol=1e-5)


def test_llama_3_s_rope_factors_in_a_file_become_its_config(tmp_path, tiny_llama):
    from llmq.profiles.gguf_config import llama3_rope_factors

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_rope_factors(scaling, 10000.0, 16).astype(np.float32)
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": factors})
    assert read_checkpoint(find_model(str(tmp_path / "tiny.gguf"))).config["rope_scaling"] == scaling
