"""A tokenizer that cannot be talked into special tokens, though its template can still write them.

The danger: a chat template is text, user content is pasted into it, and `<|im_end|>` typed by a user then ends their
turn. Encoding content and template separately would be safe and wrong: "user\\n" + "Hi" must be merged as one text.

So two tokenizers are used. The guarded one is the original with every guarded token *renamed* to a secret string
(same ids, same flags, same merges). Chat text is rendered with the guarded strings inside user content hidden behind
placeholders that no template logic can trip over; then template-written `<|im_end|>` becomes the secret name, the
placeholders become what the user typed, and the whole text is encoded at once. What the user typed is no token's name
in that tokenizer, so it is encoded as the ordinary characters that it is. Where content holds no guarded string the
two tokenizers differ in names only, hence in no id.
"""

import copy
import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

# Private-use characters and digits survive every normalizer, `|trim`, `|lower`, `|tojson` and `|escape`.
_PRIVATE_USE = range(0x100000, 0x10FFFD)


class SpecialGuard:
    """Hides guarded strings in user text, and encodes rendered text so that only the template's are tokens."""

    def __init__(self, tokenizer_json: dict[str, Any], guarded: Iterable[str]) -> None:
        self._guarded = sorted(guarded, key=len, reverse=True)  # as the tokenizer: the longest match wins
        opening, closing = map(chr, secrets.SystemRandom().sample(_PRIVATE_USE, 2))
        nonce = secrets.randbelow(10**18)
        self._secret = {name: f"{opening}{nonce}0{index}{closing}" for index, name in enumerate(self._guarded)}
        self._placeholder = {name: f"{opening}{nonce}1{index}{closing}" for index, name in enumerate(self._guarded)}
        self._fragment = re.compile(f"[{opening}{closing}]")
        self._pattern = re.compile("|".join(map(re.escape, self._guarded)) or r"(?!)")
        self._placeholder_pattern = re.compile(f"{opening}{nonce}1(\\d+){closing}")
        renamed = _rename_tokens(tokenizer_json, self._secret)
        self._tokenizer = RawTokenizer.from_str(json.dumps(renamed, ensure_ascii=False))
        for token in tokenizer_json["added_tokens"]:
            name = self._secret.get(token["content"], token["content"])
            if self._tokenizer.token_to_id(name) != token["id"]:
                raise ValueError(f"tokenizer.json: added token {token['content']!r} does not keep its id when renamed")

    def hide(self, text: str, *, allowed: frozenset[str] = frozenset()) -> str:
        """User text with each guarded string, but those in `allowed`, replaced by its placeholder."""
        return self._pattern.sub(lambda m: m[0] if m[0] in allowed else self._placeholder[m[0]], text)

    def reveal(self, rendered: str) -> str:
        """The rendered text as it would read without the guard. Raises ValueError when a placeholder was cut."""
        self._check_whole(rendered)
        return self._show(rendered)

    def encode(self, rendered: str) -> list[int]:
        """Ids of a text rendered from hidden content: the template's special tokens are tokens, the user's are not."""
        self._check_whole(rendered)
        secret = self._pattern.sub(lambda m: self._secret[m[0]], rendered)
        return self._tokenizer.encode(self._show(secret), add_special_tokens=False).ids

    def encode_literally(self, text: str) -> list[int]:
        """Ids of a text in which no guarded string is a token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _show(self, text: str) -> str:
        return self._placeholder_pattern.sub(lambda m: self._guarded[int(m[1])], text)

    def _check_whole(self, rendered: str) -> None:
        if self._fragment.search(self._placeholder_pattern.sub("", rendered)):
            raise ValueError("the chat template cuts a message inside a special token's text")


def _rename_tokens(tokenizer_json: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    model = dict(tokenizer_json["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:  # Unigram: [piece, score] in order of id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        # A merge that spells a guarded token out of ordinary text would be a second way in.
        model["merges"] = [merge for merge in model["merges"] if _spelled(merge) not in names]
    renamed = copy.copy(tokenizer_json)
    renamed["model"] = model
    renamed["post_processor"] = None  # chat text carries its own special tokens
    renamed["added_tokens"] = [
        {**token, "content": names.get(token["content"], token["content"])} for token in tokenizer_json["added_tokens"]
    ]
    return renamed


def _spelled(merge: str | list[str]) -> str:
    return "".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1)
