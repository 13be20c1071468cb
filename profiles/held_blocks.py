"""How many blocks the requests of a trace hold at a random moment, and so how many users with its lengths fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.load.arrivals import Arrival

_MOST_EXACT = 1 << 22  # blocks up to which the sum of all users is computed exactly
ENOUGH = 0.99  # how likely blocks shall suffice at a random moment


@dataclass(frozen=True)
class HeldBlocks:
    """The blocks that one running request holds at a random step: probability[b] of b blocks.

    Requests of different users are independent, so that of n users the blocks in use are the sum of n draws.
    """

    probability: np.ndarray  # [most blocks + 1], sums to 1
    num_requests: int
    num_too_long: int = 0  # left out of it: longer than the model's context

    @cached_property
    def mean(self) -> float:
        return float(self._values @ self.probability)

    @cached_property
    def variance(self) -> float:
        return float((self._values - self.mean) ** 2 @ self.probability)

    @cached_property
    def _values(self) -> np.ndarray:
        return np.arange(len(self.probability))

    def in_use(self, num_users: int, quantile: float) -> int:
        """Blocks that `num_users` requests together hold at most with the probability `quantile`."""
        if num_users == 0:
            return 0
        # The characteristic function of a sum is a product. Nothing lies 12 deviations above the mean to wrap around.
        reach = num_users * self.mean + 12 * (num_users * self.variance) ** 0.5 + len(self.probability)
        if reach > _MOST_EXACT:
            # So many draws that their sum is normal.
            return round(
                NormalDist(num_users * self.mean, (num_users * self.variance) ** 0.5 or 1e-9).inv_cdf(quantile)
            )
        size = 1 << int(min(reach, num_users * (len(self.probability) - 1)) + 1).bit_length()
        sums = np.fft.irfft(np.fft.rfft(self.probability, size) ** num_users, size)
        return int(np.searchsorted(np.cumsum(sums), quantile - 1e-9))

    def most_users(self, blocks_beside: Callable[[int], int], chance: float = ENOUGH) -> int:
        """Most users whose blocks suffice with the probability `chance`; `blocks_beside(n)` is what n of them have."""
        low, high = 0, int(blocks_beside(1) / max(self.mean, 1e-9)) + 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.in_use(middle, chance) <= blocks_beside(middle) else (low, middle - 1)
        return low


def held_blocks(trace: Sequence[Arrival], layout: KVCacheLayout, *, step_tokens: int, longest: int) -> HeldBlocks:
    """Of the requests of `trace`, each as long in the engine as it takes steps of equal length.

    A prompt is computed `step_tokens` tokens a step, then each step writes one token, all but the last. Raises
    InputError where no request is at most `longest` tokens long.
    """
    fitting = [one for one in trace if 0 < one.num_prompt_tokens + one.num_output_tokens <= longest]
    if not fitting:
        raise InputError(f"no request of the trace is at most {longest:,} tokens long")
    prompts, decodes = np.zeros(longest + 2), np.zeros(longest + 2)
    for one in fitting:
        prompt = max(1, one.num_prompt_tokens)
        prompts[step_tokens : prompt + 1 : step_tokens] += 1
        prompts[prompt] += prompt % step_tokens != 0
        decodes[prompt + 1] += 1
        decodes[max(prompt + 1, prompt + one.num_output_tokens)] -= 1
    held = np.zeros(layout.blocks_for(longest, step_tokens) + 1)
    for steps, tokens_of_step in ((prompts, step_tokens), (np.cumsum(decodes), 1)):
        for length in np.flatnonzero(steps > 0):
            held[layout.blocks_for(int(length), tokens_of_step)] += steps[length]
    return HeldBlocks(held / held.sum(), len(fitting), len(trace) - len(fitting))
