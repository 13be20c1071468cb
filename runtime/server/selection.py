"""How many sequences follow from each prompt, and which of them are returned: n, best_of, beams."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.input_processor import MAX_SEQUENCES, check_range
from llmq.runtime.frontend.output_processor import SequenceOutput
from llmq.runtime.request import BeamParams
from llmq.runtime.server.schema import GenerationRequest

# What a search that takes the likeliest continuations has no use for.
_NOT_WITH_BEAMS = (
    *("top_p", "top_k", "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "response_format", "structured_outputs", "tools", "best_of", "logprobs", "echo"),
)


@dataclass(frozen=True)
class Selection:
    """Of one prompt. Beams return their best themselves; of `num_generated` samples the best are chosen here."""

    num_generated: int
    num_returned: int
    beams: BeamParams | None = None

    @property
    def chooses(self) -> bool:
        return self.num_generated > self.num_returned

    @property
    def num_sequences(self) -> int:
        """That run at the same time."""
        return self.num_generated if self.beams is None else self.beams.width

    @classmethod
    def of(cls, request: GenerationRequest, num_prompts: int) -> "Selection":
        """Raises InvalidRequestError."""
        n = 1 if request.n is None else request.n
        check_range("n", n)
        check_range("priority", request.priority)
        if request.use_beam_search:
            made = cls(n, n, _beams(request, n))
        else:
            made = cls(_best_of(request, n), n)
        if request.max_tokens == 0 and (made.beams is not None or made.num_generated > 1):
            param = "use_beam_search" if made.beams is not None else "n" if n > 1 else "best_of"
            raise InvalidRequestError(f"{param}: not with max_tokens 0, where nothing is generated", param=param)
        if made.num_sequences * num_prompts > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"n: {made.num_sequences} sequences of {num_prompts} prompts are more than the {MAX_SEQUENCES} "
                "of a call",
                param="n",
            )
        return made

    def best(self, outputs: Sequence[SequenceOutput]) -> list[int]:
        """Places of the sequences to return, of all prompts' in order: by mean log probability of a token, highest
        first."""
        if not self.chooses:
            return list(range(len(outputs)))
        chosen = []
        for start in range(0, len(outputs), self.num_generated):
            places = range(start, start + self.num_generated)
            ranked = sorted(places, key=lambda place: -outputs[place].mean_logprob)
            chosen += ranked[: self.num_returned]
        return chosen


def _best_of(request: GenerationRequest, n: int) -> int:
    best_of = getattr(request, "best_of", None)
    if best_of is None:
        return n
    check_range("best_of", best_of)
    if best_of < n:
        raise InvalidRequestError(f"best_of must be at least n, which is {n}, got {best_of}", param="best_of")
    if request.stream and best_of > n:
        raise InvalidRequestError("best_of: which are best is known at the end, so not with stream", param="best_of")
    return best_of


def _beams(request: GenerationRequest, n: int) -> BeamParams:
    for field in _NOT_WITH_BEAMS:
        if getattr(request, field, None) not in (None, False):
            raise InvalidRequestError(f"{field}: not with use_beam_search", param=field)
    if request.temperature:
        raise InvalidRequestError("temperature: not with use_beam_search, which does not sample", param="temperature")
    width = max(n, 2) if request.beam_width is None else request.beam_width
    check_range("beam_width", width)
    if width < n:
        raise InvalidRequestError(f"beam_width must be at least n, which is {n}, got {width}", param="beam_width")
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    check_range("length_penalty", penalty)
    return BeamParams(width=width, length_penalty=penalty)
