"""Random numbers keyed by (seed, position, token): the same wherever, whenever and beside whomever it is sampled."""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def exponentials(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """Independent Exp(1) numbers, float64, one for each token id, for the draw at `position` of a request with `seed`.

    The stream of SplitMix64 (Steele, Lea, Flood 2014) whose state is hashed from seed and position, read at the token
    id: no state is kept, so a request that was preempted or moved goes on exactly as it would have.
    """
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        key = _mix(_mix(np.uint64(seed & _MASK)) + np.uint64(position) * _GOLDEN)
        bits = _mix(key + token_ids.astype(np.uint64) * _GOLDEN)
    # (bits + 1/2) / 2**53 is never 0 nor 1
    return -np.log(((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def _mix(value):
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
