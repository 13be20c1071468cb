"""Blocks in use at a random moment: the formula against a naive walk through every step, and against draws."""

import random

import numpy as np
import pytest

from llmq.profiles import held_blocks as module
from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError
from llmq.profiles.held_blocks import HeldBlocks, held_blocks
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.load.arrivals import Arrival


def layout(**more) -> KVCacheLayout:
    config = {
        "model_type": "mistral",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        **more,
    }
    return KVCacheLayout.of(ModelArchitecture.from_config(config), "bf16")


def naive(trace, layout, step_tokens):
    """Blocks after each step of each request."""
    found = []
    for one in trace:
        computed = 0
        while computed < one.num_prompt_tokens:
            computed = min(computed + step_tokens, one.num_prompt_tokens)
            found.append(layout.blocks_for(computed, step_tokens))
        for _ in range(one.num_output_tokens - 1):
            computed += 1
            found.append(layout.blocks_for(computed, 1))
    return found


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_every_step_of_every_request_is_counted_once(window, step_tokens):
    rng = random.Random(step_tokens)
    trace = [Arrival(0.0, rng.randint(1, 300), rng.randint(1, 60)) for _ in range(50)]
    made = held_blocks(trace, layout(sliding_window=window), step_tokens=step_tokens, longest=400)
    expected = np.bincount(naive(trace, layout(sliding_window=window), step_tokens), minlength=len(made.probability))
    assert made.probability == pytest.approx(expected / expected.sum())
    assert made.mean == pytest.approx(np.mean(naive(trace, layout(sliding_window=window), step_tokens)))


def test_what_is_longer_than_the_context_is_left_out_and_counted():
    trace = [Arrival(0.0, 10, 5), Arrival(0.0, 390, 11)]
    made = held_blocks(trace, layout(), step_tokens=64, longest=400)
    assert (made.num_requests, made.num_too_long) == (1, 1)
    with pytest.raises(InputError, match="no request of the trace is at most 12 tokens long"):
        held_blocks(trace, layout(), step_tokens=64, longest=12)


def test_the_blocks_of_several_users_are_the_sum_of_their_draws():
    probability = np.array([0.0, 0.5, 0.2, 0.0, 0.0, 0.3])
    made = HeldBlocks(probability, 1)
    exact = np.array([1.0])
    for users in range(1, 8):
        exact = np.convolve(exact, probability)
        for quantile in (0.01, 0.5, 0.9, 0.99, 1.0):
            assert made.in_use(users, quantile) == int(np.searchsorted(np.cumsum(exact), quantile - 1e-9)), users


def test_many_users_hold_what_draws_hold():
    rng = np.random.default_rng(0)
    probability = rng.random(40) ** 3
    probability /= probability.sum()
    made = HeldBlocks(probability, 1)
    drawn = rng.choice(40, size=(20_000, 100), p=probability).sum(axis=1)
    for quantile in (0.5, 0.99):
        assert made.in_use(100, quantile) == pytest.approx(np.quantile(drawn, quantile), rel=0.01)


def test_beyond_what_is_exact_the_sum_is_normal(monkeypatch):
    rng = np.random.default_rng(1)
    made = HeldBlocks((shares := rng.random(60)) / shares.sum(), 1)
    exact = [made.in_use(500, quantile) for quantile in (0.5, 0.99)]
    monkeypatch.setattr(module, "_MOST_EXACT", 100)
    assert [made.in_use(500, quantile) for quantile in (0.5, 0.99)] == pytest.approx(exact, rel=1e-3)
    # A pool that no machine has is no reason to compute for minutes.
    monkeypatch.undo()
    assert made.most_users(lambda _: 10**12) == pytest.approx(10**12 / made.mean, rel=1e-3)


def test_most_users_is_the_most():
    made = HeldBlocks(np.array([0.0, 0.5, 0.0, 0.5]), 1)
    for blocks in (0, 2, 3, 50, 1000):
        users = made.most_users(lambda _, blocks=blocks: blocks)
        assert made.in_use(users, 0.99) <= blocks < made.in_use(users + 1, 0.99)
    # Each user takes something of the pool beside his blocks.
    assert made.most_users(lambda users: 100 - users) < made.most_users(lambda _: 100)
