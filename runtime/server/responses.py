"""The OpenAI API's objects: choices, chunks, log probabilities, usage. Pure functions of what was generated."""

from collections.abc import Sequence
from typing import Any

import msgspec

from llmq.runtime.frontend.output_processor import ScoredToken
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]


def sse(data: Json) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


def usage(num_prompt: int, num_completion: int, num_cached: int) -> Json:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> Json:
    """The `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}

    return {
        "content": [
            entry(one.logprobs.token_id, one.logprobs.logprob)
            | {"top_logprobs": [entry(*alternative) for alternative in one.logprobs.top]}
            for one in scored
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The `logprobs` of a text choice: four lists, one entry a token. `text_offset` counts from the choice's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, token_id: int, scored: TokenLogprobs | None, offset: int) -> None:
        """`scored` is None for a prompt's tokens without a log probability: the first, and those not asked for."""
        lists = self.lists
        lists["tokens"].append(self._name(token_id))
        lists["token_logprobs"].append(None if scored is None else max(scored.logprob, LOWEST_LOGPROB))
        lists["top_logprobs"].append(None if scored is None else self._alternatives(scored))
        lists["text_offset"].append(offset)

    def _alternatives(self, scored: TokenLogprobs) -> dict[str, float]:
        """The asked number of most likely tokens, and the chosen one where it is not among them."""
        alternatives: dict[str, float] = {}
        for token_id, logprob in [*scored.top, (scored.token_id, scored.logprob)]:
            alternatives.setdefault(self._name(token_id), max(logprob, LOWEST_LOGPROB))
        return alternatives

    def _name(self, token_id: int) -> str:
        """A token's text; one that is no whole characters as `bytes:\\xf0…`, as OpenAI writes it."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
