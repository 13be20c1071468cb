"""Admission: will the requests that run, and one more, fit until they end? Learned lengths, no clock."""

import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmq.profiles.kv_spec import KVCacheGroup
from llmq.runtime.kv_manager import KVCacheManager, PrefixHit
from llmq.runtime.request import Request

# Lengths of this many finished requests are remembered, and believed once there are MIN_HISTORY of them.
HISTORY = 512
MIN_HISTORY = 16
# The share of requests of a length seen so far that end at or before what is expected.
QUANTILE = 0.8
UNKNOWN = np.iinfo(np.int32).max  # more tokens than any limit allows
# What is taken for a mean before there is a history: about that of conversations (Azure's trace of 2023 has 211).
TYPICAL_TOKENS = 200


class LengthHistory:
    """How many tokens requests had generated when they ended, whatever ended them: an end token, a limit, a stop string
    or their client. Who was aborted before its first token says nothing of lengths and is not in it."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def record(self, num_output_tokens: int) -> None:
        self._recent.append(num_output_tokens)
        bisect.insort(self._sorted, num_output_tokens)
        if len(self._recent) > HISTORY:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    def expected_remaining(self, num_output_tokens: np.ndarray) -> np.ndarray:
        """Tokens that requests which have generated so many will still generate: the QUANTILE of those that got as far.
        UNKNOWN without enough of them."""
        lengths = np.array(self._sorted)
        if len(lengths) < MIN_HISTORY:
            return np.full_like(num_output_tokens, UNKNOWN)
        first = np.searchsorted(lengths, num_output_tokens, side="right")  # of those that got further
        longer = len(lengths) - first
        index = first + np.minimum(longer - 1, (longer * QUANTILE).astype(np.int64))
        return np.where(longer > 0, lengths[index] - num_output_tokens, UNKNOWN)

    def mean_remaining(self, num_output_tokens: np.ndarray) -> np.ndarray:
        """Tokens that requests which have generated so many will still generate, in the mean of those that got further.
        TYPICAL_TOKENS without enough of them."""
        lengths = np.array(self._sorted)
        if len(lengths) < MIN_HISTORY:
            return np.full_like(num_output_tokens, TYPICAL_TOKENS)
        first = np.searchsorted(lengths, num_output_tokens, side="right")
        longer = len(lengths) - first
        sums = np.append(np.cumsum(lengths[::-1])[::-1], 0)[first]
        return np.where(longer > 0, sums // np.maximum(longer, 1) - num_output_tokens, TYPICAL_TOKENS)


class Admission:
    """Admitting by what fits now alone makes a full pool thrash: each preemption throws away what it computed."""

    def __init__(self, kv: KVCacheManager, max_model_len: int) -> None:
        self.lengths = LengthHistory()
        self.num_deferrals = 0
        self._kv = kv
        self._max_model_len = max_model_len

    def has_room(self, request: Request, hit: PrefixHit, running: Sequence[Request]) -> bool:
        """Whether `request` fits now, and will together with all of `running` until they have ended."""
        if self._kv.blocks_to_admit(request, hit) > self._kv.pool.num_free_blocks:
            return False
        if not running:
            return True
        fits = peak_blocks(self._kv.groups, *self._lengths_to_come([*running, request])) <= self._kv.pool.num_blocks
        self.num_deferrals += not fits
        return fits

    def mean_to_come(self, requests: Sequence[Request]) -> "ToCome":
        """What is to be expected of each: for sums over many, not for a limit that must hold."""
        return self._to_come(requests, self.lengths.mean_remaining)

    def _lengths_to_come(self, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens that each has, tokens that it will add). Sequences that are still to come of a request, forks or
        beams, will each hold as much as it does."""
        found = self._to_come(requests, self.lengths.expected_remaining)
        return np.repeat(found.tokens, found.copies), np.repeat(found.remaining, found.copies)

    def _to_come(self, requests: Sequence[Request], expected: Callable[[np.ndarray], np.ndarray]) -> "ToCome":
        tokens, outputs, most, to_the_end, copies = (
            np.array(
                [
                    (
                        len(one.token_ids),
                        len(one.token_ids) - one.num_prompt_tokens,
                        one.sampling_params.max_tokens,
                        one.runs_to_its_limit,
                        1 + one.num_to_come,
                    )
                    for one in requests
                ],
                dtype=np.int64,
            )
            .reshape(-1, 5)
            .T
        )
        most = np.clip(np.minimum(most - outputs, self._max_model_len - tokens), 0, None)
        return ToCome(tokens, np.where(to_the_end, most, np.minimum(most, expected(outputs))), copies)


@dataclass(frozen=True)
class ToCome:
    """Of each of some requests: tokens that it has, tokens that it will add, and how many sequences it will be."""

    tokens: np.ndarray
    remaining: np.ndarray
    copies: np.ndarray


def peak_blocks(groups: Sequence[KVCacheGroup], num_tokens: Sequence[int], remaining: Sequence[int]) -> int:
    """Most blocks that requests hold at once until all have ended, if each grows by a token a step.

    `num_tokens` they have, `remaining` they will add. The peak lies where one of them ends: those with less to go have
    given theirs back, those with more have grown by as much (Gong et al. 2025, arXiv 2507.10150, eq. 3).
    """
    tokens, left = np.asarray(num_tokens, dtype=np.int32), np.asarray(remaining, dtype=np.int32)
    ends = np.unique(left)[:, None]
    grown = (tokens + ends) * (left >= ends)  # [moments at which one ends, each]
    blocks = np.zeros_like(grown)
    for group in groups:
        held = (grown + (group.block_tokens - 1)) // group.block_tokens
        if group.spec.window is not None:
            held = np.minimum(held, group.blocks_for(max(int(grown.max()), 1)))
        blocks += held
    return int(blocks.sum(axis=1).max())
