"""Pieces of a tokenizer.json that every kind of GGUF tokenizer has."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

# GGUF token types (llama.cpp's llama_token_type).
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def bpe_model(vocab: dict[str, int], merges: list[list[str]], **changes: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
        **changes,
    }


def added_token(token_id: int, content: str, *, special: bool, normalized: bool = False) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized}
    return {"id": token_id, "content": content, **flags, "special": special}


def bos_processor(fields: Mapping[str, Any], *, adds_bos: bool) -> Json | None:
    """Puts the BOS token in front of a text, where the file says that its tokenizer does, or `adds_bos` and it says
    nothing."""
    if not fields.get("tokenizer.ggml.add_bos_token", adds_bos):
        return None
    bos_id = fields["tokenizer.ggml.bos_token_id"]
    bos = fields["tokenizer.ggml.tokens"][bos_id]
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pair = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, *pair],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
