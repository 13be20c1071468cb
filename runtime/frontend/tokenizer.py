"""Tokenizer: text to ids and back for one model folder, on the `tokenizers` library alone."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from llmq.profiles.errors import InputError
from llmq.runtime.frontend.chat_template import ChatTemplate, Message, read_chat_template
from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.special_guard import SpecialGuard
from llmq.runtime.frontend.token_bytes import TokenDecoder


class Tokenizer:
    """What evals and the server both encode with, so that both see the same ids.

    BOS: `encode` adds what the tokenizer itself adds (tokenizer.json's post-processor, or `add_bos_token` where
    tokenizer_config.json has it) and never a second one; `encode_chat` adds nothing, for the template has written it.
    """

    def __init__(self, folder: Path, tokenizer_json: dict[str, Any], tokenizer_config: dict[str, Any]) -> None:
        self.folder = folder
        self._config = tokenizer_config
        self._named_tokens = _named_tokens(folder, tokenizer_config)
        self._json = _with_named_tokens_special(tokenizer_json, self._named_tokens)
        self._tokenizer = RawTokenizer.from_str(json.dumps(self._json, ensure_ascii=False))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._decoder = TokenDecoder(self._json.get("decoder"))
        self.special_token_ids = frozenset(t["id"] for t in self._json["added_tokens"] if t["special"])
        source = read_chat_template(folder, tokenizer_config)
        self.chat_template = None if source is None else ChatTemplate(source, self._named_tokens)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Raises InputError where the folder has no readable tokenizer.json."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder} has no tokenizer.json: save it there with `AutoTokenizer.save_pretrained`")
        try:
            return cls(
                folder, json.loads(path.read_text(encoding="utf-8")), _read_json(folder, "tokenizer_config.json")
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. The model's may be larger: embeddings are often padded."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def words(self) -> dict[int, str]:
        """Every token that there is, as tokenizer.json writes it."""
        return {token_id: token for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The one that the tokenizer itself names; generation ends at any of `eos_token_ids`."""
        return self._named_id("eos_token")

    @cached_property
    def adds_bos(self) -> bool:
        """Whether `encode` starts a text with BOS."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Where generation ends: the union of what generation_config, config and the tokenizer say."""
        ids = {self._named_id("eos_token")}
        config = _read_json(self.folder, "config.json")
        for source in (_read_json(self.folder, "generation_config.json"), config, config.get("text_config") or {}):
            value = source.get("eos_token_id")
            ids.update(value if isinstance(value, list) else [value])
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def longest_token_bytes(self) -> int:
        """No text of n bytes is fewer than n / this many tokens."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens written in it are special tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        if not add_special_tokens or bos is None:
            return ids
        wanted = self._config.get("add_bos_token")
        if wanted is True and ids[:1] != [bos]:
            return [bos, *ids]
        plain = self._tokenizer.encode(text, add_special_tokens=False).ids if ids[:1] == [bos] else ids
        if wanted is False or plain[:1] == [bos]:  # refused by the config, or already written in the text
            return plain
        return ids

    def encode_literally(self, text: str) -> list[int]:
        """Ids of a text in which no special token's name means anything, and none is added."""
        return self._guard.encode_literally(text)

    def encode_chat(
        self, messages: list[Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation through the chat template. Equal to transformers' `apply_chat_template`, but that the
        names of special tokens in message text and in tools stay text.

        An assistant's own words may hold the markers that are not special but that its template writes (`</think>`):
        templates look for them there, and the model did produce them.
        """
        rendered = self._render_guarded(messages, add_generation_prompt, tools)
        try:
            return self._guard.encode(rendered)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="messages") from error

    def render_chat(self, messages: list[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text."""
        return self._guard.reveal(self._render_guarded(messages, add_generation_prompt))

    def added_token_id(self, name: str) -> int | None:
        """The id of a token that is one by its name alone, special or not; None: there is none."""
        return next((token["id"] for token in self._json["added_tokens"] if token["content"] == name), None)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        kept = (i for i in token_ids if not (skip_special_tokens and i in self.special_token_ids))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._decoder.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for a padded id that has no token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._decoder.to_bytes(token)
        return found

    def _render_guarded(
        self, messages: list[Message], add_generation_prompt: bool, tools: list[Any] | None = None
    ) -> str:
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template (chat_template.jinja): use /v1/completions", param="messages"
            )
        hidden = [self._hide(message) for message in messages]
        hidden_tools = None if tools is None else [self._hide(tool) for tool in tools]
        return self.chat_template.render(hidden, tools=hidden_tools, add_generation_prompt=add_generation_prompt)

    def _hide(self, message: Message) -> Message:
        allowed = self._template_markers if message.get("role") == "assistant" else frozenset()

        def hide(value: Any) -> Any:
            if isinstance(value, str):
                return self._guard.hide(value, allowed=allowed)
            if isinstance(value, dict):
                return {hide(key): hide(item) for key, item in value.items()}
            return [hide(item) for item in value] if isinstance(value, list) else value

        return {key: hide(value) for key, value in message.items()}

    @cached_property
    def _template_markers(self) -> frozenset[str]:
        """Added tokens that are not special, yet structure to this model, for its template writes them."""
        source = self.chat_template.source if self.chat_template else ""
        names = (t["content"] for t in self._json["added_tokens"] if not t["special"])
        return frozenset(name for name in names if name.strip() and name in source)

    @cached_property
    def _guard(self) -> SpecialGuard:
        special = {t["content"] for t in self._json["added_tokens"] if t["special"]}
        return SpecialGuard(self._json, special | self._template_markers)

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _named_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` … by name, from special_tokens_map.json and tokenizer_config.json (which wins)."""
    named = {}
    for source in (_read_json(folder, "special_tokens_map.json"), tokenizer_config):
        for name, value in source.items():
            token = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token, str):
                named[name] = token
    return named


def _with_named_tokens_special(tokenizer_json: dict[str, Any], named: dict[str, str]) -> dict[str, Any]:
    """A token that the config names is special, whatever tokenizer.json calls it: transformers marks it so on load."""
    names = set(named.values())
    added = [{**t, "special": t["special"] or t["content"] in names} for t in tokenizer_json["added_tokens"]]
    vocab = tokenizer_json["model"]["vocab"]
    known = {t["content"] for t in added}
    for name in sorted(names - known):
        if isinstance(vocab, dict) and name in vocab:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": vocab[name], "content": name, "special": True, **flags})
    return {**tokenizer_json, "added_tokens": sorted(added, key=lambda token: token["id"])}
