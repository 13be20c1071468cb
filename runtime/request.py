"""What crosses the engine's border: requests in, outputs out. Plain data, no torch."""

from typing import Literal

import msgspec

from llmq.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. The engine knows token ids only."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time_s: float = 0.0  # time.monotonic() where it was accepted
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # requests share prefix blocks only under the same salt


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
    error: str | None = None


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


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of a started engine: limits to validate against and facts to show."""

    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_blocks: int
    block_tokens: int
    kv_cache_bytes: int
    weight_bytes: int
    device: str
    fingerprint: dict[str, str]  # what decides the numerics: kernels, dtypes, head, KV dtype, weights' hash
