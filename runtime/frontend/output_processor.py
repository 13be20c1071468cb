"""OutputProcessor: what the engine's tokens mean to a reader. Text, stop strings, finish reasons, usage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from llmq.runtime.frontend.detokenizer import IncrementalDetokenizer, StopStringMatcher
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import FinishReason, RequestOutput, TokenLogprobs


@dataclass(frozen=True)
class ScoredToken:
    """One token with its log probability, and where its text begins in the sequence's text."""

    logprobs: TokenLogprobs
    text_offset: int


class SequenceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine output added to a sequence."""

    request_id: str
    text: str = ""
    token_ids: list[int] = []
    scored_tokens: list[ScoredToken] | None = None  # one per token, when log probabilities were asked for
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


class SequenceOutput:
    """The growing output of one request.

    Tokens are counted up to the one that ends the sequence, itself included: an end token, the token that completes a
    stop string, or the last of `max_tokens`. What an engine produced past it (a step may bring several) is neither
    returned nor counted. Within the first `min_tokens` tokens stop strings are not looked for.
    """

    def __init__(
        self,
        request_id: str,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id = request_id
        self.text = ""
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._min_tokens = min_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, shown=shown)
        self._matcher = StopStringMatcher(stop)
        self._sum_logprobs = 0.0
        self._num_decoded = 0  # characters of decoded text, held-back ones included

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, where log probabilities were asked for."""
        return self._sum_logprobs / max(1, len(self.token_ids))

    def process(self, output: RequestOutput) -> SequenceDelta:
        """Take what a step brought. `finish_reason` may be set where the engine's is not: then abort the request."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        pieces: list[str] = []
        offsets: list[int] = []
        for position, token_id in enumerate(output.new_token_ids):
            offsets.append(self._num_decoded)
            is_end_token = output.stop_token_id is not None and position == len(output.new_token_ids) - 1
            pieces.append(self._push(token_id, is_end_token))
            if self._matcher.matched is not None:
                break
        token_ids = output.new_token_ids[: len(offsets)]
        finish_reason = "stop" if self._matcher.matched is not None else output.finish_reason
        if finish_reason is not None and self._matcher.matched is None:
            pieces.append(self._matcher.flush())
        text = "".join(pieces)
        self.text += text
        self.finish_reason = finish_reason
        scored = None
        if output.logprobs is not None:
            scored = [ScoredToken(*pair) for pair in zip(output.logprobs[: len(offsets)], offsets, strict=True)]
            self._sum_logprobs += sum(one.logprobs.logprob for one in scored)
        return SequenceDelta(
            request_id=self.request_id,
            text=text,
            token_ids=token_ids,
            scored_tokens=scored,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish_reason,
            error=output.error,
        )

    def _push(self, token_id: int, is_end_token: bool) -> str:
        self.token_ids.append(token_id)
        if is_end_token:
            return ""
        text = self._detokenizer.push(token_id)
        self._num_decoded += len(text)
        return text if len(self.token_ids) <= self._min_tokens else self._matcher.push(text)


class OutputProcessor:
    """Many sequences at once, for whoever steps an engine itself: `process` is what follows `Engine.step`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sequences: dict[str, SequenceOutput] = {}

    def add(self, request_id: str, *, stop: Sequence[str] = (), min_tokens: int = 0) -> SequenceOutput:
        """Follow a request; the returned sequence keeps its text and tokens after it has finished."""
        sequence = SequenceOutput(request_id, self._tokenizer, stop=stop, min_tokens=min_tokens)
        self._sequences[request_id] = sequence
        return sequence

    def process(self, outputs: Iterable[RequestOutput]) -> tuple[list[SequenceDelta], list[str]]:
        """(what was added, the ids to abort because a stop string ended them). Unknown ids are ignored: aborted."""
        deltas: list[SequenceDelta] = []
        to_abort: list[str] = []
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            delta = sequence.process(output)
            deltas.append(delta)
            if delta.finish_reason is not None:
                del self._sequences[output.request_id]
                if output.finish_reason is None:
                    to_abort.append(output.request_id)
        return deltas, to_abort
