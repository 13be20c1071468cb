"""The bytes each token stands for, read off a tokenizer's `decoder`, so that text can be made token by token.

`tokenizers.Tokenizer.decode` works on whole sequences: decoding one token at a time turns half an emoji into U+FFFD.
Bytes have no such trouble: the bytes of a sequence are the bytes of its tokens, one after the other.
"""

import re
from collections.abc import Callable
from typing import Any

from llmq.profiles.errors import InputError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: each byte as one printable character (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    # A token with any character outside the table is text as it stands (an added token): tokenizers' own rule.
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


class TokenDecoder:
    """`to_bytes(token)` for one tokenizer; `strips_leading_space`: a whole text loses the space it begins with."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        """`decoder` is that entry of tokenizer.json. Raises InputError for a kind that is not known."""
        steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        self.strips_leading_space = False
        self._steps: list[Callable[[str], str]] = []
        self._byte_level = False
        self._byte_fallback = False
        for step in steps:
            self._add(step)

    def to_bytes(self, token: str) -> bytes:
        if self._byte_level:
            return _byte_level(token)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        for step in self._steps:
            token = step(token)
        return token.encode()

    def _add(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Fuse":
            pass  # joins what was decoded so far: bytes are joined anyway
        elif kind == "Replace" and "String" in step["pattern"]:
            old, new = step["pattern"]["String"], step["content"]
            self._steps.append(lambda token: token.replace(old, new))
        elif kind == "Metaspace":
            mark = step.get("replacement", "▁")
            self._steps.append(lambda token: token.replace(mark, " "))
            self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and step["start"] == 1 and step["stop"] == 0:
            self.strips_leading_space = True
        else:
            raise InputError(
                f"tokenizer.json: decoder {kind!r} ({step}) is not one that llmq can decode token by token "
                "(known: ByteLevel, ByteFallback, Fuse, Replace of a string, Metaspace, Strip of one leading space)"
            )
