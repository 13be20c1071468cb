"""What a model folder says about its tokenizer, from its JSON files: no tokenizer is built."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TokenizerFacts:
    """None: the folder does not say. Tokens are text, ids come from tokenizer.json or config.json."""

    vocab_size: int | None
    special_tokens: dict[str, tuple[str | None, int | None]]  # "bos", "eos", "pad": token and id
    stop_ids: tuple[int, ...]  # of generation_config.json, else config.json
    adds_bos: bool | None
    has_chat_template: bool


def tokenizer_facts(folder: Path, config: dict[str, Any]) -> TokenizerFacts:
    """Read the tokenizer's files of `folder`, whichever there are."""
    tokenizer, settings = _json(folder / "tokenizer.json"), _json(folder / "tokenizer_config.json")
    vocabulary = _vocabulary(tokenizer)
    named = {}
    for short in ("bos", "eos", "pad"):
        token = settings.get(f"{short}_token")
        text = token.get("content") if isinstance(token, dict) else token
        token_id = vocabulary.get(text) if text else config.get(f"{short}_token_id")
        named[short] = (text, token_id[0] if isinstance(token_id, list) and token_id else token_id)
    stop = _json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    return TokenizerFacts(
        vocab_size=len(vocabulary) or None,
        special_tokens=named,
        stop_ids=tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,),
        adds_bos=_adds_bos(tokenizer, settings),
        has_chat_template=(folder / "chat_template.jinja").is_file() or bool(settings.get("chat_template")),
    )


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    words = tokenizer.get("model", {}).get("vocab", {})
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    # Unigram models list [word, score] pairs, their place being the id.
    listed = {word: token_id for token_id, (word, _) in enumerate(words)} if isinstance(words, list) else words
    return {**listed, **added}


def _adds_bos(tokenizer: dict[str, Any], settings: dict[str, Any]) -> bool | None:
    """Whether encoding a text puts the BOS token in front: the template of tokenizer.json's post-processor."""
    if not tokenizer:
        return settings.get("add_bos_token")
    processor = tokenizer.get("post_processor") or {}
    steps = [processor, *processor.get("processors", [])]
    return any("SpecialToken" in piece for step in steps for piece in step.get("single", [])[:1])


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
