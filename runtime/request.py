"""What crosses the engine's border: requests in, outputs out. Plain data, no torch."""

from typing import TYPE_CHECKING, Literal

import msgspec

from llmq.runtime.memory import MemoryProfile
from llmq.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmq.runtime.beam_search import BeamSearch

FinishReason = Literal["stop", "length", "abort", "error", "shed"]  # shed: it could not have kept the engine's SLO


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """Beam search instead of sampling: `width` beams are extended at every step, and a hypothesis of n tokens scores
    its log probability / n ** length_penalty."""

    width: int
    length_penalty: float = 1.0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. The engine knows token ids only."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time_s: float = 0.0  # time.monotonic() where it was accepted
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # requests share prefix blocks only under the same salt
    tenant: str = ""  # whose share it counts against, where several wait
    # More continuations of the same prompt, (request_id, seed) each: the prompt is computed once, its blocks are shared
    # until the texts part, and from the first token on each is a request of its own.
    forks: list[tuple[str, int | None]] = []
    # With beams the request and its forks name the best hypotheses, best first, each sent whole at the end.
    beams: BeamParams | None = None

    @property
    def names(self) -> list[str]:
        """The ids under which its outputs come."""
        return [self.request_id, *(name for name, _ in self.forks)]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of one token, its rank (1: the most likely), and the most likely alternatives in order."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per new token, when asked for
    # Entry i belongs to prompt position `prompt_logprobs_start + i`; sent once, with the first output after the prompt.
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, where finish_reason is "stop"
    cumulative_logprob: float | None = None  # of a hypothesis of a beam search
    queue_s: float | None = None  # with the first output: how long it waited to be scheduled
    error: str | None = None  # also why it was shed
    retry_after_s: float | None = None  # where it was shed


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step. Counters are totals since start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # blocks that can be given out, cached ones included
    num_steps: int
    prompt_tokens: int  # computed, not counting prefix hits
    generation_tokens: int
    prefix_cache_queries: int  # tokens
    prefix_cache_hits: int  # tokens
    num_preemptions: int
    preempted_tokens: int = 0  # computed, then given up to make room: they are computed again
    num_deferrals: int = 0  # steps in which a request waited that there were blocks for, so that others can go on
    # Of the last step, where an SLO is kept: what it was allowed, and the spread taken off the promise (1: none).
    step_max_tokens: int = 0
    step_max_seqs: int = 0
    step_spread: float = 1.0
    draft_tokens: int = 0  # guessed and verified
    accepted_draft_tokens: int = 0  # of which the model said the same
    draft_s: float = 0.0  # spent on guessing
    pooled_draft_tokens: int = 0  # guessed by what other requests were answered


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of a started engine: limits to validate against and facts to show."""

    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_blocks: int
    block_tokens: int
    num_ranks: int = 1  # `weight_bytes` are of all, `kv_cache_bytes` of each (of the fullest where they differ)
    num_stages: int = 1  # that these ranks are in
    num_kv_groups: int = 1  # of more than one a block of each holds its own number of tokens
    kv_cache_bytes: int
    weight_bytes: int
    packed_weights: str = ""  # where they are kept as native kernels read them, for people
    packages: list[str] = []  # of others' kernels, which were picked and why not: for people
    device: str
    fingerprint: dict[str, str]  # what decides the numerics: kernels, dtypes, head, KV dtype, weights' hash
    pace: "Pace | None" = None  # where an SLO is kept
    drafter: str = ""  # what guesses tokens; empty: nothing
    memory: MemoryProfile | None = None  # of the fullest rank, where blocks are what a GPU has left


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that keeps an SLO measured at its start."""

    floor_s: float  # of a step: one short sequence that decodes
    most_decodes: int  # sequences of `context` tokens that decode at once within the SLO
    context: int


class Request:
    """The scheduler's own state of one EngineRequest. `token_ids` is the prompt and all committed output."""

    def __init__(self, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self.sampling_params = request.sampling_params
        self.arrival_time_s = request.arrival_time_s
        self.priority = request.priority
        self.cache_salt = request.cache_salt
        self.tenant = request.tenant
        self.forks = request.forks  # until the first token
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.draft_token_ids: list[int] = []  # guesses of what follows, to be verified in its next step
        self.num_computed_tokens = 0
        self.num_tokens_in_flight = 0  # of steps that have not ended, behind the computed ones
        self.num_unknown_tokens = 0  # behind `token_ids`: that steps in flight sample, and the next one may compute
        self.num_tokens_told = 0  # to the runner
        self.num_cached_tokens = 0  # of the first admission: what the user is told
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs_pending = request.sampling_params.prompt_logprobs is not None
        self.block_digests: list[list[bytes]] = []  # KVCacheManager's: per group, the chain over full blocks
        self.search: BeamSearch | None = None  # the beam search that decides its next token

    @property
    def names(self) -> list[str]:
        """Of the outputs that are owed: its own and those of forks to come, or those of its search's hypotheses."""
        return [self.request_id, *(name for name, _ in self.forks)] if self.search is None else self.search.names

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that a forward has to see. Where a prompt is scored and nothing generated, nobody asks what follows
        its last token."""
        num_tokens = len(self.token_ids)
        return num_tokens - 1 if self.sampling_params.max_tokens == 0 and num_tokens > 1 else num_tokens

    @property
    def num_tokens_to_plan(self) -> int:
        """`num_tokens_to_compute`, and those that nobody has read yet."""
        return self.num_tokens_to_compute + self.num_unknown_tokens

    @property
    def is_sampled_unseen(self) -> bool:
        """Its next token can be sampled before the last one has come to the host: nothing reads that one but the
        forward itself. A grammar, penalties and what forks or searches do read it."""
        params = self.sampling_params
        return (
            self.search is None
            and not self.forks
            and params.grammar is None
            and params.repetition_penalty == 1.0
            and not params.presence_penalty
            and not params.frequency_penalty
        )

    @property
    def num_planned_tokens(self) -> int:
        """Computed, or in a step that computes them now."""
        return self.num_computed_tokens + self.num_tokens_in_flight

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_held(self) -> bool:
        """A beam that has said what follows it, and waits until its siblings have."""
        return self.search is not None and self.search.has_report(self.request_id)

    @property
    def runs_to_its_limit(self) -> bool:
        """No token ends it; a beam search goes on beside the hypotheses that end."""
        return self.sampling_params.ignore_eos or self.search is not None

    @property
    def num_to_come(self) -> int:
        """Sequences that will go on from what it has: its forks, or beams of its search."""
        return len(self.forks) if self.search is None else self.search.num_to_come(self.request_id)

    @property
    def max_cached_tokens(self) -> int:
        """How many leading tokens may come from the prefix cache: one is left to compute, and so is every position
        whose prompt log probability was asked for (position p is predicted at p - 1)."""
        limit = self.num_tokens_to_compute - 1
        if self.prompt_logprobs_pending:
            limit = min(limit, self.sampling_params.prompt_logprobs_start - 1)
        return limit

    def fork(self, request_id: str, seed: int | None) -> "Request":
        """Another continuation of what is computed: same tokens, same parameters but for the seed."""
        params = msgspec.structs.replace(self.sampling_params, seed=seed, prompt_logprobs=None)
        child = Request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=self.token_ids,
                sampling_params=params,
                arrival_time_s=self.arrival_time_s,
                priority=self.priority,
                cache_salt=self.cache_salt,
                tenant=self.tenant,
            )
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_tokens = self.num_cached_tokens
        child.search = self.search
        child.block_digests = [list(digests) for digests in self.block_digests]
        return child

    @property
    def order(self) -> tuple[int, float]:
        return (self.priority, self.arrival_time_s)
