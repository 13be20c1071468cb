"""Admission: will the requests that run, and one more, fit until they end? Learned lengths, no clock."""

import bisect
from collections import deque
from collections.abc import Sequence

import numpy as np

from llmq.profiles.kv_spec import KVCacheGroup
from llmq.runtime.kv_manager import KVCacheManager, PrefixHit
from llmq.runtime.request import Request

# Lengths of this many finished requests are remembered, and believed once there are MIN_HISTORY of them.
HISTORY = 512
MIN_HISTORY = 16
# The share of requests of a length seen so far that end at or before what is expected.
QUANTILE = 0.8


class LengthHistory:
    """How many tokens requests had generated when an end token or their limit ended them. Who was aborted, as by a stop
    string, is not in it."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def record(self, num_output_tokens: int) -> None:
        self._recent.append(num_output_tokens)
        bisect.insort(self._sorted, num_output_tokens)
        if len(self._recent) > HISTORY:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    def expected_remaining(self, request: Request) -> int:
        """Tokens that `request` will still generate, at most what it may: the QUANTILE of those that got as far.

        Without enough of them, and where end tokens are ignored, all that it may.
        """
        done, most = request.num_output_tokens, request.max_remaining_tokens
        if request.sampling_params.ignore_eos:
            return most
        longer = len(self._sorted) - bisect.bisect_right(self._sorted, done)
        if len(self._sorted) < MIN_HISTORY or not longer:
            return most
        index = len(self._sorted) - longer + min(longer - 1, int(longer * QUANTILE))
        return min(most, self._sorted[index] - done)


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
        # Forks that are still to come will each hold as much as their parent.
        together = [one for one in (*running, request) for _ in range(1 + len(one.forks))]
        remaining = [
            min(self.lengths.expected_remaining(one), self._max_model_len - one.num_tokens) for one in together
        ]
        peak = peak_blocks(self._kv.groups, [one.num_tokens for one in together], remaining)
        fits = peak <= self._kv.pool.num_blocks
        self.num_deferrals += not fits
        return fits


def peak_blocks(groups: Sequence[KVCacheGroup], num_tokens: Sequence[int], remaining: Sequence[int]) -> int:
    """Most blocks that requests hold at once until all have ended, if each grows by a token a step.

    `num_tokens` they have, `remaining` they will add. The peak lies where one of them ends: those with less to go have
    given theirs back, those with more have grown by as much (Gong et al. 2025, arXiv 2507.10150, eq. 3).
    """
    tokens, left = np.asarray(num_tokens), np.asarray(remaining)
    grown = np.where(left[None] >= left[:, None], tokens[None] + left[:, None], 0)  # [the one that ends, each]
    blocks = np.zeros_like(grown)
    for group in groups:
        held = -(-grown // group.block_tokens)
        if group.spec.window is not None:
            held = np.minimum(held, group.blocks_for(max(int(grown.max()), 1)))
        blocks += held
    return int(blocks.sum(axis=1).max())
