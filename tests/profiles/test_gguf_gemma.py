"""Gemma 3 in a GGUF: its weights, what its config does not hold, and its SentencePiece tokenizer."""

import itertools
import pydoc_data.topics
import random

import gguf
import numpy as np
import pytest
import torch
from tiny_model import save_tiny_model
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmq.profiles.checkpoint import find_model, read_checkpoint
from llmq.profiles.errors import InputError

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def pieces() -> list[tuple[str, float, int]]:
    """(piece, score, type) of a vocabulary as SentencePiece trains it, in the spelling of llama.cpp's files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, max_token_length=12)
    tokenizer.train_from_iterator(list(pydoc_data.topics.topics.values())[:4], trainer)
    trained = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    made = [(name, -1000.0, CONTROL) for name in ("<pad>", "<eos>", "<bos>")]
    made += [("<unk>", -1000.0, UNKNOWN), ("<start_of_turn>", -1000.0, CONTROL)]
    made += [(piece, -1000.0, USER_DEFINED) for piece in ("\n", "\n\n", "  ", "    ", "<b>")]
    made += [(f"<0x{byte:02X}>", -1000.0, BYTE) for byte in range(256)]
    taken = {piece.replace(" ", "▁") for piece, _, _ in made}
    return made + [(piece, -float(rank), NORMAL) for rank, piece in enumerate(trained) if piece not in taken]


def sentencepiece(text: str, pieces: list[tuple[str, float, int]]) -> list[int]:
    """Its algorithm, naively: user-defined pieces are cut out, then the best-scoring neighbours are merged."""
    ids = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    fixed = [piece for piece, _, kind in pieces if kind == USER_DEFINED]
    symbols: list[tuple[str, bool]] = []
    while text:
        longest = max((piece for piece in fixed if text.startswith(piece)), key=len, default="")
        symbols.append((longest or text[0].replace(" ", "▁"), bool(longest)))
        text = text[len(longest) or 1 :]
    while True:
        unions = [
            (scores[a + b], -at)
            for at, ((a, fixed_a), (b, fixed_b)) in enumerate(itertools.pairwise(symbols))
            if not fixed_a and not fixed_b and a + b in scores
        ]
        if not unions:
            break
        at = -max(unions)[1]
        symbols[at : at + 2] = [(symbols[at][0] + symbols[at + 1][0], False)]
    made = []
    for piece, _ in symbols:
        made += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return made


def write_gguf(path, pieces, source=None, add_space_prefix=False) -> dict[str, np.ndarray]:
    """Write the tiny Gemma of `source`; return what its tensors are, under their Hugging Face names."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(add_space_prefix)
    expected = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = expected[name] = tensor.numpy()
        if name.endswith("norm.weight"):
            values = values + np.float32(1)
            expected[name] = values - np.float32(1)
        writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


@pytest.fixture
def tiny_gemma(tmp_path, pieces):
    return save_tiny_model(
        tmp_path / "source",
        "gemma3_text",
        vocab_size=len(pieces),
        head_dim=32,
        sliding_window=16,
        query_pre_attn_scalar=32,
        num_hidden_layers=7,  # the sixth of which sees everything
    )


def test_weights_come_back_and_transformers_computes_the_same(tmp_path, tiny_gemma, pieces):
    expected = write_gguf(tmp_path / "tiny.gguf", pieces, tiny_gemma)
    folder = find_model(str(tmp_path / "tiny.gguf"))
    state = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    for name, values in expected.items():
        assert torch.equal(state[name], torch.from_numpy(values).bfloat16()), name
    original, ours = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tiny_gemma, folder))
    original.load_state_dict(ours.state_dict())
    ids = torch.arange(3, 60)[None]
    assert torch.equal(ours(ids).logits, original(ids).logits)
    windows = [layer.window for layer in read_checkpoint(folder).architecture.attention]
    assert windows == [16] * 5 + [None, 16]


def test_text_becomes_the_tokens_of_sentencepiece(tmp_path, tiny_gemma, pieces):
    write_gguf(tmp_path / "tiny.gguf", pieces, tiny_gemma)
    tokenizer = AutoTokenizer.from_pretrained(find_model(str(tmp_path / "tiny.gguf")))
    rng = random.Random(0)
    alphabet = [piece.replace("▁", " ") for piece, _, kind in pieces if kind in (NORMAL, USER_DEFINED)]
    texts = ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 12))) for _ in range(300)]
    texts += [
        "Hello  world",
        "a\tb\n\n\n c",
        "日本 🦙 é",
        "   x",
        "if <b> then",
        " ",
        *pydoc_data.topics.topics["with"].split("\n"),
    ]
    for text in texts:
        assert tokenizer(text).input_ids == [2, *sentencepiece(text, pieces)], text
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer("<start_of_turn>").input_ids == [2, 4]


def test_a_tokenizer_that_puts_a_space_first_is_refused(tmp_path, tiny_gemma, pieces):
    write_gguf(tmp_path / "tiny.gguf", pieces, tiny_gemma, add_space_prefix=True)
    with pytest.raises(InputError, match="puts a space before each text"):
        find_model(str(tmp_path / "tiny.gguf"))
