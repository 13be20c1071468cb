"""What a generation looks like to the client: text completions and chat completions, whole or in chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmq.runtime.frontend.detokenizer import IncrementalDetokenizer
from llmq.runtime.frontend.output_processor import SequenceDelta
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import TokenLogprobs
from llmq.runtime.server.generation import Choice
from llmq.runtime.server.responses import CompletionLogprobs, Json
from llmq.runtime.server.selection import Selection


@dataclass(frozen=True)
class AnswerHead:
    """What every object of one answer repeats."""

    call_id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def json(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class Answer(ABC):
    """Deltas in; chunks out one by one, or one whole object at the end. An answer is used in one of the two ways."""

    whole_kind: str
    chunk_kind: str

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer

    @abstractmethod
    def chunk_choices(self, choice: Choice, delta: SequenceDelta) -> list[Json]:
        """The entries for `choices` that a delta makes, each for a chunk of its own; maybe none."""

    @abstractmethod
    def add(self, choice: Choice, delta: SequenceDelta) -> None:
        """Keep a delta for `whole_choices`."""

    @abstractmethod
    def whole_choices(self, choices: Sequence[Choice]) -> list[Json]:
        """The `choices` of the answer as one object."""

    def chunks(self, choice: Choice, delta: SequenceDelta) -> list[Json]:
        return [self._head.json(self.chunk_kind, [entry]) for entry in self.chunk_choices(choice, delta)]

    def usage_chunk(self, usage: Json) -> Json:
        return self._head.json(self.chunk_kind, []) | {"usage": usage}

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        return self._head.json(self.whole_kind, self.whole_choices(choices)) | {"usage": usage}


class TextAnswer(Answer):
    """`/v1/completions`. With `echo` a choice begins with its prompt, and so do its log probabilities."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: Tokenizer,
        *,
        echo: bool,
        logprobs: bool,
        selection: Selection,
        with_token_ids: bool = False,
    ) -> None:
        super().__init__(head, tokenizer)
        self._with_token_ids = with_token_ids
        self._echo = echo
        self._selection = selection
        self._with_logprobs = logprobs
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._text: dict[int, str] = {}
        self._prompt_text: dict[int, str] = {}  # choices that have begun
        self._prompt_scores: dict[
            int, list[TokenLogprobs]
        ] = {}  # by identity of the prompt: brought by its first choice

    def chunk_choices(self, choice: Choice, delta: SequenceDelta) -> list[Json]:
        text, logprobs = self._take(choice, delta, CompletionLogprobs(self._tokenizer))
        has_ids = self._with_token_ids and delta.token_ids
        if not text and not delta.scored_tokens and not has_ids and delta.finish_reason is None:
            return []
        return [self._entry(choice, text, logprobs, delta.finish_reason, delta.token_ids)]

    def add(self, choice: Choice, delta: SequenceDelta) -> None:
        logprobs = self._logprobs.setdefault(choice.index, CompletionLogprobs(self._tokenizer))
        text, _ = self._take(choice, delta, logprobs)
        self._text[choice.index] = self._text.get(choice.index, "") + text

    def whole_choices(self, choices: Sequence[Choice]) -> list[Json]:
        chosen = [choices[place] for place in self._selection.best([one.output for one in choices])]
        return [
            self._entry(
                one, self._text[one.index], self._logprobs[one.index], one.output.finish_reason, one.output.token_ids
            )
            | {"index": index}
            for index, one in enumerate(chosen)
        ]

    def _entry(
        self,
        choice: Choice,
        text: str,
        logprobs: CompletionLogprobs,
        finish_reason: str | None,
        token_ids: list[int],
    ) -> Json:
        entry = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs.lists if self._with_logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._with_token_ids:
            entry |= {"token_ids": list(token_ids), "prompt_token_ids": choice.prompt.token_ids}
        return entry

    def _take(
        self, choice: Choice, delta: SequenceDelta, logprobs: CompletionLogprobs
    ) -> tuple[str, CompletionLogprobs]:
        """The text that a delta adds (the first time the echo too), its log probabilities added to `logprobs`."""
        echoed = ""
        if choice.index not in self._prompt_text:
            echoed = self._begin(choice, delta, logprobs) if self._echo else ""
            self._prompt_text[choice.index] = echoed
        start = len(self._prompt_text[choice.index])
        for scored in delta.scored_tokens or ():
            logprobs.add(scored.logprobs.token_id, scored.logprobs, start + scored.text_offset)
        return echoed + delta.text, logprobs

    def _begin(self, choice: Choice, delta: SequenceDelta, logprobs: CompletionLogprobs) -> str:
        ids = choice.prompt.token_ids
        text, offsets = echoed_prompt(self._tokenizer, ids)
        if self._with_logprobs:
            scores = self._prompt_scores.setdefault(id(choice.prompt), delta.prompt_logprobs or [])
            unscored = [None] * (len(ids) - len(scores))  # the first, and those before prompt_logprobs_start
            for token_id, scored, offset in zip(ids, [*unscored, *scores], offsets, strict=True):
                logprobs.add(token_id, scored, offset)
        return text


def echoed_prompt(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """(text of a prompt, offset of each token). Special tokens are shown, but not a BOS that is always added."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    text, offsets = "", []
    for position, token_id in enumerate(prompt_token_ids):
        offsets.append(len(text))
        if not (position == 0 and tokenizer.adds_bos and token_id == tokenizer.bos_token_id):
            text += detokenizer.push(token_id)
    return text, offsets
