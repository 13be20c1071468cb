"""Random numbers keyed by (seed, position): the same wherever, whenever and beside whomever a token is sampled."""

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` of a request with `seed`.

    SplitMix64's output function (Steele, Lea, Flood 2014) over the two keys: no state, so a request that was preempted
    or moved goes on exactly as it would have.
    """
    return (_mix(_mix(seed & _MASK) + position * _GOLDEN) >> 11) / float(1 << 53)


def uniforms(seeds: list[int], positions: list[int]) -> np.ndarray:
    return np.array([uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)])


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
