"""Beam search over requests that share blocks: which beams go on, which hypotheses are kept. No KV, no queues."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from llmq.runtime.request import BeamParams, FinishReason


@dataclass(frozen=True)
class Hypothesis:
    token_ids: list[int]  # of the output; the end token included, where one ended it
    logprob: float  # summed
    score: float
    finish_reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Extension:
    """A beam of the next step: the parent's tokens and one more."""

    parent_id: str
    token_id: int
    logprob: float  # summed, this token's included


@dataclass
class BeamSearch:
    """The state of one search. Every live beam is a request of the scheduler; a step is done when all have reported.

    As in Wu et al. 2016 (arXiv 1609.08144, section 7) candidates are the 2 × width best continuations of each beam, so
    that `width` go on however many end; length is normalized by n ** length_penalty. It ends at max_tokens, or when no
    beam is left.
    """

    names: list[str]  # under which the best hypotheses are returned, best first
    params: BeamParams
    max_tokens: int
    end_token_ids: Collection[int]
    live: dict[str, float]  # request -> its summed log probability
    finished: list[Hypothesis] = field(default_factory=list)
    _reported: dict[str, tuple[list[int], list[tuple[int, float]]]] = field(default_factory=dict)

    def report(self, request_id: str, output_token_ids: Sequence[int], candidates: Sequence[tuple[int, float]]) -> bool:
        """Take what a beam has so far and its likeliest next tokens. True when the step is complete."""
        if request_id in self.live:
            self._reported[request_id] = (list(output_token_ids), list(candidates))
        return len(self._reported) == len(self.live)

    def num_to_come(self, request_id: str) -> int:
        """Beams that the next step adds to those that live, counted at one of them."""
        return self.params.width - len(self.live) if request_id == next(iter(self.live), None) else 0

    def has_report(self, request_id: str) -> bool:
        return request_id in self._reported

    def extend(self) -> list[Extension]:
        """End the step: hypotheses that end are kept, the `width` best others are returned; none when it is over."""
        going = []
        for request_id, (token_ids, candidates) in self._reported.items():
            for token_id, logprob in candidates:
                total = self.live[request_id] + logprob
                if token_id in self.end_token_ids:
                    self._finish([*token_ids, token_id], total, "stop", len(token_ids))
                else:
                    going.append((self._score(total, len(token_ids) + 1), Extension(request_id, token_id, total)))
        going.sort(key=lambda scored: scored[0], reverse=True)
        best = [extension for _, extension in going[: self.params.width]]
        length = 1 + max(len(token_ids) for token_ids, _ in self._reported.values())
        if length >= self.max_tokens:
            for extension in best:
                token_ids = [*self._reported[extension.parent_id][0], extension.token_id]
                self._finish(token_ids, extension.logprob, "length", length)
            best = []
        self._reported = {}
        return best

    def best(self) -> list[Hypothesis]:
        """The best hypotheses, one for each name."""
        return sorted(self.finished, key=lambda hypothesis: hypothesis.score, reverse=True)[: len(self.names)]

    def _finish(self, token_ids: list[int], logprob: float, reason: FinishReason, length: int) -> None:
        stop = token_ids[-1] if reason == "stop" else None
        self.finished.append(Hypothesis(token_ids, logprob, self._score(logprob, length), reason, stop))

    def _score(self, logprob: float, length: int) -> float:
        return logprob / max(1, length) ** self.params.length_penalty
