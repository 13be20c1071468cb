"""tokenizer.json and its companions from the metadata of a GGUF file, token id by token id."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmq.profiles.errors import InputError
from llmq.profiles.gguf_sentencepiece import sentencepiece_json
from llmq.profiles.tokenizer_parts import CONTROL, USER_DEFINED, Json, added_token, bos_processor, bpe_model

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool, trim_offsets: bool = True) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim_offsets, "use_regex": use_regex}


def _split(pattern: str) -> list[Json]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        _byte_level(use_regex=False, trim_offsets=False),
    ]


# `tokenizer.ggml.pre` -> how text is cut before merging, and how it is normalized first.
# A name that is not here is refused: a tokenizer that is almost right costs accuracy in silence.
_PRE_TOKENIZERS: dict[str, list[Json]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "qwen2": _split(_WORDS.format(digits=r"\p{N}")),
    "llama-bpe": _split(_WORDS.format(digits=r"\p{N}{1,3}")),
}
_NORMALIZERS: dict[str, Json] = {"qwen2": {"type": "NFC"}}
_ADDS_BOS_UNLESS_TOLD = ("llama-bpe",)
_IGNORES_MERGES = ("llama-bpe",)  # a whole word of the vocabulary is taken as it is


def write_tokenizer(fields: Mapping[str, Any], folder: Path, context_length: int) -> None:
    """Write tokenizer.json, its config, special_tokens_map.json and, where there is one, chat_template.jinja."""
    named = special_tokens(fields)
    settings = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(fields), ensure_ascii=False), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", named)
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": "<|im_start|>", …} from the file's own ids."""
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    ids = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def tokenizer_json(fields: Mapping[str, Any]) -> Json:
    """The file of the `tokenizers` library. Raises InputError for a tokenizer that is not reproduced exactly."""
    kind = fields.get("tokenizer.ggml.model")
    if kind == "llama":
        return sentencepiece_json(fields)
    if kind != "gpt2":
        raise InputError(
            f"GGUF tokenizer {kind!r} is not one that llmq converts (gpt2: byte-level BPE; llama: SentencePiece BPE)"
        )
    pre = fields.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise InputError(f"GGUF pre-tokenizer {pre!r} is not one that llmq converts ({', '.join(_PRE_TOKENIZERS)})")
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    parts = _PRE_TOKENIZERS[pre]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(token_id, token, special=kind == CONTROL)
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": _NORMALIZERS.get(pre),
        "pre_tokenizer": parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts},
        "post_processor": bos_processor(fields, adds_bos=pre in _ADDS_BOS_UNLESS_TOLD),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe_model(
            {token: token_id for token_id, token in enumerate(tokens)},
            [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
            ignore_merges=pre in _IGNORES_MERGES,
        ),
    }
