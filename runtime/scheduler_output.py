"""SchedulerOutput: one step as plain data. The same object drives one process or eight ranks."""

import msgspec

from llmq.runtime.request import TokenLogprobs
from llmq.runtime.sampling_params import SamplingParams


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the runner does not know (new, or back after preemption), in full."""

    request_id: str
    token_ids: list[int]  # the prompt and what was generated before a preemption
    num_prompt_tokens: int
    sampling_params: SamplingParams
    score_prompt: bool  # prompt log probabilities are still owed
    forks: list[tuple[str, int | None]] = []  # further samples of the first token: their names and seeds
    cache_salt: str = ""  # nothing is shared with requests of another one


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Positions [num_computed_tokens, num_computed_tokens + num_scheduled_tokens) of one request."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool  # the request's last token is among them: a new one follows from it
    new_token_ids: list[int] = []  # what followed from its last step, which ranks that do not sample learn here
    # Where its block tables have changed: for each group its blocks from `first_block` on.
    first_block: tuple[int, ...] = ()
    block_ids: tuple[list[int], ...] = ()
    draft_token_ids: list[
        int
    ] = []  # the last of the scheduled tokens: guesses of what follows, which this step verifies
    max_draft_tokens: int = 0  # how many to guess for the next step


class DraftPrices(msgspec.Struct, frozen=True, kw_only=True):
    """What guesses are weighed by, in seconds (`speculative.policy`)."""

    token_s: float  # what a token more is worth: so long may a sure guess of one take
    rows_s: tuple[float, ...]  # what 0, 1, 2, … guesses add to the step that verifies them: at most so many are made
    plain_s: float  # a step that guesses nothing
    spare_s: float  # what guessing may cost now, if no guess is right


class DraftTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How much is guessed for the next step. Without prices whatever speaks for a token is reason enough."""

    num_tokens: int = 0  # for each request that decodes, at most; 0: no speculation
    prices: DraftPrices | None = None
    most_s: float = float("inf")  # that guessing may take of this step, beside which somebody waits for his next token


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    new_requests: list[NewRequest]
    scheduled: list[ScheduledRequest]
    forgotten_request_ids: list[str]  # finished, aborted or preempted since the last step
    block_copies: list[tuple[int, int]]  # (source, target), before anything is written: copy-on-write
    num_scheduled_tokens: int
    num_prompt_tokens: int  # of the scheduled ones
    drafts: DraftTerms = DraftTerms()


class DraftPass(msgspec.Struct, frozen=True, tag=True):
    """What a drafter computes between two steps: tokens of requests from a position on. The first rank decides on it as
    it goes, and tells those that have the same requests and know of no guess."""

    request_ids: list[str]
    starts: list[int]
    token_ids: list[list[int]]
    are_named: list[bool]  # the word after the last token is asked for
    features: bytes = b""  # hidden states beside the tokens, of EAGLE's pairs


class RequestResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the runner made of one ScheduledRequest."""

    token_ids: list[int] = []  # the drafts that were accepted, and the token after them
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt positions predicted in this step, in order
    forks: dict[str, "RequestResult"] = {}  # the first tokens of `NewRequest.forks`, by name: some may have ended since
    draft_token_ids: list[int] = []  # guesses of what follows `token_ids`
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    results: dict[str, RequestResult]
    draft_s: float = 0.0  # spent on guesses for the next step
