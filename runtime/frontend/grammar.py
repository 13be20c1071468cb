"""Grammars for structured output, by llguidance: made from what a caller asks for, and followed token by token.

A grammar travels as text, in llguidance's own JSON. The HTTP process makes and checks it, the engine follows it.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object"}
# JSON allows any amount of blanks between two tokens, and small models are glad to write nothing else.
_JSON_BLANKS = r"[ \n\t]{0,20}"
MAX_GRAMMAR_BYTES = 2**20


class GrammarCompiler:
    """Bound to one model's vocabulary. Building that takes a moment, and happens when a grammar first comes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted({*eos_token_ids, *tokenizer.eos_token_ids})

    @classmethod
    def from_folder(cls, folder: str | Path, vocab_size: int, eos_token_ids: Collection[int]) -> "GrammarCompiler":
        return cls(Tokenizer.from_folder(folder), vocab_size, eos_token_ids)

    def matcher(self, grammar: str) -> LLMatcher:
        """At the start of the grammar. Never raises: see `LLMatcher.is_error`."""
        return LLMatcher(self._vocabulary, grammar, log_level=0)

    def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequestError, in llguidance's words, for what this model cannot be held to."""
        if not self._eos_token_ids:
            raise InvalidRequestError(f"{param}: this model has no end token, so no text would ever end", param=param)
        check_size(grammar, param)

        def refusal(why: str) -> InvalidRequestError:
            return InvalidRequestError(f"{param} cannot be followed: {why.strip()}", param=param)

        with panics_raise(refusal):
            failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary)
            if failed:
                raise refusal(messages[0])
            matcher = self.matcher(grammar)
            matcher.compute_bitmask()  # what is too complex shows only now
            if matcher.is_error():
                raise refusal(matcher.get_error())

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        eos = self._eos_token_ids
        return LLTokenizer(_Vocabulary(self._tokenizer, self._vocab_size, eos[0]), eos_token=eos)


def check_size(grammar: str, param: str) -> None:
    """Raises InvalidRequestError."""
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"{param}: larger than {MAX_GRAMMAR_BYTES // 2**20} MiB", param=param)


class _Vocabulary:
    """What llguidance wants to know of a tokenizer (its TokenizerWrapper's attributes)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode_literally(text if isinstance(text, str) else text.decode(errors="replace"))


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """JSON that validates against a JSON Schema, with few blanks between its tokens."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _JSON_BLANKS})


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression matches as a whole (Rust's syntax; no look-around)."""
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of some texts."""
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


@contextmanager
def panics_raise(make_error: Callable[[str], Exception]) -> Iterator[None]:
    """llguidance is written in Rust, and a panic there is no Exception here: it would pass every handler."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make_error(f"llguidance failed: {error}") from None
