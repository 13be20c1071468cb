"""SentencePiece's BPE (Kudo and Richardson 2018, arXiv 1808.06226) of a GGUF as tokenizer.json: Gemma's tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmq.profiles.errors import InputError
from llmq.profiles.tokenizer_parts import CONTROL, NORMAL, USER_DEFINED, Json, added_token, bos_processor, bpe_model

_SPACE = "▁"  # what SentencePiece writes for a space


def sentencepiece_json(fields: Mapping[str, Any]) -> Json:
    """tokenizer.json of a file whose pieces have scores, and no merges. Raises InputError for a tokenizer that puts a
    space before a text: `tokenizers` does that otherwise than SentencePiece where special tokens stand between."""
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        raise InputError("a GGUF tokenizer 'llama' that puts a space before each text is not one that llmq converts")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        # Pieces that a user defined are cut out before anything is merged, and are themselves never merged. They are
        # spelled with ▁ for spaces, so they are looked for in the text as it is normalized.
        "added_tokens": [
            added_token(token_id, token, special=kind == CONTROL, normalized=kind == USER_DEFINED)
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": bos_processor(fields, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": bpe_model(
            {token: token_id for token_id, token in enumerate(tokens)},
            merges_by_score(tokens, types, fields["tokenizer.ggml.scores"]),
            unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """Every way to make a piece of two others, best score first: SentencePiece merges the neighbours whose union scores
    best, which is the order in which BPE applies its list of merges."""
    pieces = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL}
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [[left, right] for _, left, right in merges]
