"""Sampling on the device: temperature, top-k, top-p, min-p and the draw, without sorting the vocabulary."""

import triton
import triton.language as tl
from torch import Tensor

from llmq.runtime.kernels.triton.launch import Launch

WORDS = 1024  # of the vocabulary at a time
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _mix(value):
    """SplitMix64's, as in `sampling.noise`: uint64 arithmetic modulo 2**64."""
    value = value + _GOLDEN
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _weights(row, start, vocab_size, highest, temperature, WORDS: tl.constexpr):
    """exp((l - highest) / T) of some words: 1 for the likeliest, and 0 behind the vocabulary."""
    word = start + tl.arange(0, WORDS)
    logits = tl.load(row + word, mask=word < vocab_size, other=-float("inf"))
    shifted = tl.div_rn(logits, temperature + tl.zeros_like(logits))
    return tl.exp(shifted - tl.div_rn(highest, temperature))


@triton.jit
def _reaching(row, vocab_size, highest, temperature, goal, floor, BY_MASS: tl.constexpr, WORDS: tl.constexpr):
    """The highest bits b >= floor such that the words whose weight's bits are at least b are `goal` in number, or in
    mass: bits of floats from 0 to 1 are in the order of the floats, so that 30 halvings find it."""
    low, high = floor, tl.full([], 0x3F800001, tl.int32)
    for _ in tl.range(0, 30):
        middle = (low + high) // 2
        reached = tl.full([], 0.0, tl.float64)
        for start in tl.range(0, vocab_size, WORDS):
            weights = _weights(row, start, vocab_size, highest, temperature, WORDS)
            word = start + tl.arange(0, WORDS)
            is_in = (weights.to(tl.int32, bitcast=True) >= middle) & (word < vocab_size)
            counted = tl.where(is_in, weights if BY_MASS else 1.0, 0.0)
            reached += tl.sum(counted, 0).to(tl.float64)
        if high - low > 1:
            if reached >= goal:
                low = middle
            else:
                high = middle
    return low


@triton.jit
def _sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    token_ids,
    highest_logits,
    vocab_size,
    row_stride,
    WORDS: tl.constexpr,
):
    """One row. Bytes: its logits 2 times for a greedy row, 3 for a drawn one, 31 times for each of top-k and top-p that
    it asks for; from the L2 cache but the first time. FLOPs: 5 a logit each time."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * row_stride
    highest = tl.full([], -float("inf"), tl.float32)
    likeliest = tl.full([], 0, tl.int32)
    has_nan = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab_size, WORDS):
        word = start + tl.arange(0, WORDS)
        values = tl.load(row + word, mask=word < vocab_size, other=-float("inf"))
        has_nan = tl.maximum(has_nan, tl.max((values != values).to(tl.int32), 0))
        most = tl.max(values, 0)
        if most > highest:
            highest = most
            likeliest = start + tl.argmax(values, 0)
    tl.store(highest_logits + index, tl.where(has_nan > 0, float("nan"), highest))
    token_id = likeliest
    temperature = tl.load(temperatures + index)
    if (temperature > 0) & (has_nan == 0):
        threshold = tl.full([], 0, tl.int32)
        top_k = tl.load(top_ks + index)
        if (top_k > 0) & (top_k < vocab_size):
            threshold = _reaching(row, vocab_size, highest, temperature, top_k, threshold, False, WORDS)
        top_p = tl.load(top_ps + index)
        if top_p < 1.0:
            mass = tl.full([], 0.0, tl.float64)
            for start in tl.range(0, vocab_size, WORDS):
                weights = _weights(row, start, vocab_size, highest, temperature, WORDS)
                mass += tl.sum(tl.where(weights.to(tl.int32, bitcast=True) >= threshold, weights, 0.0), 0).to(
                    tl.float64
                )
            goal = mass * top_p
            threshold = _reaching(row, vocab_size, highest, temperature, goal, threshold, True, WORDS)
        min_p = tl.load(min_ps + index)
        threshold = tl.maximum(threshold, min_p.to(tl.int32, bitcast=True))
        seed = tl.load(seeds + index).to(tl.uint64, bitcast=True)
        position = tl.load(positions + index).to(tl.uint64)
        key = _mix(_mix(seed) + position * _GOLDEN)
        best = tl.full([], -1.0, tl.float64)
        for start in tl.range(0, vocab_size, WORDS):
            word = start + tl.arange(0, WORDS)
            weights = _weights(row, start, vocab_size, highest, temperature, WORDS)
            bits = _mix(key + word.to(tl.uint64) * _GOLDEN)
            uniform = ((bits >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2**-53
            score = weights.to(tl.float64) / -tl.log(uniform)
            is_in = (weights.to(tl.int32, bitcast=True) >= threshold) & (word < vocab_size)
            score = tl.where(is_in, score, -1.0)
            most = tl.max(score, 0)
            if most > best:
                best = most
                token_id = start + tl.argmax(score, 0)
    tl.store(token_ids + index, token_id.to(tl.int64))


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    highest: Tensor,
) -> Launch:
    """A token of each row of float32 logits [num_rows, vocab_size] into `token_ids` (int64), and its highest logit (NaN
    where one is NaN) into `highest` (float32): what `sampling.sampler.draw` draws, by the same noise.

    For each row: temperature (0: the likeliest word) and top_p, min_p float32, top_k int32 (0: all), seed and position
    int64. Words that tie with the last one that top-k or top-p lets in are in too, where a sort would cut among them.
    """
    return Launch(
        _sample,
        (logits.shape[0],),
        {
            "logits": logits,
            "temperatures": temperatures,
            "top_ks": top_ks,
            "top_ps": top_ps,
            "min_ps": min_ps,
            "seeds": seeds,
            "positions": positions,
            "token_ids": token_ids,
            "highest_logits": highest,
            "vocab_size": logits.shape[1],
            "row_stride": logits.stride(0),
        },
        {"WORDS": min(WORDS, triton.next_power_of_2(logits.shape[1]))},
        num_warps=8,
        num_stages=2,
    )
