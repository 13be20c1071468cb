"""Sampling: each rule against its definition, the drawn distribution against the exact one, rows apart."""

import math
import random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from engine_driver import force_preemption, greedy, run_all

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.sampling import logprobs
from llmq.runtime.sampling.noise import exponentials
from llmq.runtime.sampling.sampler import Sampler, sample, truncate
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import NewRequest


def row(params: SamplingParams, token_ids=(7,), num_prompt_tokens=1) -> RunnerRequest:
    return RunnerRequest(
        NewRequest(
            request_id="r",
            token_ids=list(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling_params=params,
            score_prompt=False,
        ),
        num_groups=1,
    )


def choose(logits: list[float], params: SamplingParams, **state) -> int:
    return Sampler(eos_token_ids=[2])(torch.tensor([logits]), [row(params, **state)])[0].token_ids[0]


def test_noise_is_exponential_and_keyed():
    ids = np.arange(2000)
    drawn = np.concatenate([exponentials(seed, position, ids) for seed in range(5) for position in range(20)])
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(1, abs=0.01)
    assert drawn.var() == pytest.approx(1, abs=0.03)
    assert (drawn > 3).mean() == pytest.approx(math.exp(-3), abs=0.002)
    assert len(np.unique(drawn)) == len(drawn)
    assert np.array_equal(exponentials(5, 9, ids)[[3, 700]], exponentials(5, 9, np.array([3, 700])))
    assert np.array_equal(exponentials(-1, 3, ids), exponentials(2**64 - 1, 3, ids))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 99}, 5),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.89}, 3),
        ({"min_p": 0.25}, 3),
        ({"min_p": 1.0}, 1),
        ({"top_k": 3, "top_p": 0.54}, 1),  # 0.5 is 0.555… of the three that top_k left
        ({"top_k": 3, "top_p": 0.56}, 2),
        ({"top_p": 0.9, "min_p": 0.5}, 2),
        ({"top_p": 1e-9}, 1),
    ],
)
def test_truncation_keeps(params, kept):
    probs = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04])
    assert len(truncate(probs, params.get("top_k", 0), params.get("top_p", 1.0), params.get("min_p", 0.0))) == kept


def test_a_head_too_short_to_tell_says_so():
    probs = torch.tensor([0.3, 0.2])
    assert truncate(probs, 0, 0.9, 0.0) is None
    assert truncate(probs, 0, 1.0, 0.1) is None
    assert len(truncate(probs, 0, 0.4, 0.0)) == 2


def test_a_flat_distribution_wider_than_the_candidates_is_drawn_whole():
    logits = torch.zeros(1, 5000)
    params = SamplingParams(temperature=1.0, top_p=0.99)
    drawn = {sample(logits.clone(), [row(SamplingParams(**{**_fields(params), "seed": s}))])[0] for s in range(400)}
    assert len(drawn) > 350
    assert max(drawn) > 4000


@pytest.mark.parametrize(("highest", "temperature"), [(3e38, 0.5), (20.0, 1e-40), (-3e38, 0.5)])
def test_a_temperature_by_which_a_logit_overflows_takes_the_likeliest(highest, temperature):
    logits = torch.full((1, 50), -torch.inf)
    logits[0, :20] = -3.1e38
    logits[0, 7] = highest
    assert sample(logits, [row(SamplingParams(temperature=temperature, seed=1))]) == [7]


def _fields(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in params.__struct_fields__}


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_p": 0.9, "temperature": 1.5}],
    ids=repr,
)
def test_draws_follow_the_exact_distribution(changes):
    """Chi-square of 20,000 draws: p > 0.001 for the exact distribution."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    params = {"temperature": 1.0, **changes}
    probs = torch.softmax(logits.double() / params["temperature"], dim=0)
    kept = len(truncate(probs.float(), params.get("top_k", 0), params.get("top_p", 1.0), params.get("min_p", 0.0)))
    expected = probs[:kept] / probs[:kept].sum()
    requests = [row(SamplingParams(**params, seed=seed)) for seed in range(20_000)]
    counts = torch.bincount(torch.tensor(sample(logits.expand(20_000, -1).clone(), requests)), minlength=6)
    assert int(counts[kept:].sum()) == 0
    chi_square = float((((counts[:kept] - 20_000 * expected) ** 2) / (20_000 * expected)).sum())
    bound = {1: 1e-9, 2: 10.83, 3: 13.82, 4: 16.27, 5: 18.47, 6: 20.52}  # 0.999 quantiles of kept - 1 degrees
    assert chi_square < bound[kept]


def test_an_impossible_token_is_never_drawn():
    logits = torch.full((1, 5), -torch.inf)
    logits[0, [1, 3]] = 0.0
    drawn = {sample(logits, [row(SamplingParams(temperature=1.0, seed=seed))])[0] for seed in range(200)}
    assert drawn == {1, 3}


def test_rounding_does_not_change_a_draw():
    """Logits that differ in their last bits, as after another order of summation, draw the same tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 20_000, generator=generator) * 2
    nudged = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=generator))
    requests = [row(SamplingParams(temperature=1.0, seed=seed)) for seed in range(300)]
    assert [sample(logits, [r])[0] for r in requests] == [sample(nudged, [r])[0] for r in requests]


def test_penalties_follow_their_formulas():
    # prompt 0, output 1 1 3
    state = {"token_ids": [0, 1, 1, 3], "num_prompt_tokens": 1}
    assert choose([1.0, 1.9, 1.2, 0.0], greedy(5, presence_penalty=0.6), **state) == 1
    assert choose([1.0, 1.9, 1.2, 0.0], greedy(5, presence_penalty=0.8), **state) == 2
    assert choose([1.0, 1.9, 1.2, 0.0], greedy(5, frequency_penalty=0.3), **state) == 1
    assert choose([1.0, 1.9, 1.2, 0.0], greedy(5, frequency_penalty=0.4), **state) == 2
    assert choose([3.0, 1.0, 1.4, 0.0], greedy(5, repetition_penalty=2.0), **state) == 0
    assert choose([3.0, 1.0, 1.6, 0.0], greedy(5, repetition_penalty=2.0), **state) == 2  # the prompt counts too
    assert choose([-1.0, -1.1, -1.5, -2.0], greedy(5, repetition_penalty=2.0), **state) == 2  # negative: multiplied


def test_bias_and_min_tokens():
    assert choose([1.0, 0.0, 0.0], greedy(5, logit_bias={1: 1.5})) == 1
    eager_to_end = [0.0, 1.0, 5.0]
    free = SamplingParams(temperature=0.0, max_tokens=9)
    held = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=2)
    assert choose(eager_to_end, free) == 2
    assert choose(eager_to_end, held) == 1
    assert choose(eager_to_end, held, token_ids=[7, 1, 1]) == 2
    assert choose(eager_to_end, SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({1}))) == 0


@pytest.mark.parametrize("cached_bytes", [1, 4 * 50 * 3, 2**20])
def test_scores_in_slices_are_those_of_the_whole(cached_bytes):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with equal ones
    token_ids = [0, 49, 3, 3, 7, 11, 20]
    with patch.object(logprobs, "CACHED_BYTES", cached_bytes):
        made = logprobs.score_tokens(logits, token_ids, 2)
    assert made == logprobs.token_logprobs(torch.log_softmax(logits, dim=-1), token_ids, 2)
    assert [one.token_id for one in made] == token_ids


def test_logprobs_are_of_the_models_own_distribution():
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    params = greedy(5, logprobs=2, logit_bias={0: 100.0})
    made = Sampler([])(logits.clone(), [row(params)])[0]
    expected = torch.log_softmax(logits[0], dim=0)
    entry = made.logprobs[0]
    assert (entry.token_id, entry.rank) == (0, 4)
    assert entry.logprob == pytest.approx(expected[0].item())
    assert [token for token, _ in entry.top] == [2, 3]
    assert [value for _, value in entry.top] == pytest.approx([expected[2].item(), expected[3].item()])


def test_a_request_is_not_changed_by_its_neighbours(tiny_llama, make_engine):
    """Cases C26 and E14: each request of a shuffled, mixed batch answers as it does alone."""
    folder = tiny_llama()
    kinds = [
        SamplingParams(temperature=0.0, repetition_penalty=2.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=99, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.2, seed=7, top_p=0.9, top_k=40, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, seed=3, min_p=0.05, frequency_penalty=0.5, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, logit_bias={5: 4.0}, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True),  # unseeded: may vary
    ]
    prompt = [11, 12, 13, 14]
    alone = [run_all(make_engine(folder), [prompt], params)[0].token_ids for params in kinds]
    mixed = [index for index in range(len(kinds)) for _ in range(6)]
    random.Random(0).shuffle(mixed)
    made = run_all(make_engine(folder), [prompt] * len(mixed), [kinds[index] for index in mixed])
    for index, collected in zip(mixed, made, strict=True):
        if index != 5:
            assert collected.token_ids == alone[index]
    assert len({tuple(c.token_ids) for i, c in zip(mixed, made, strict=True) if i == 5}) > 1


def test_sampled_tokens_survive_preemption(tiny_llama, make_engine):
    folder = tiny_llama()
    given = [[index] * 30 for index in range(3, 11)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, presence_penalty=0.3)
    roomy = make_engine(folder)
    expected = [made.token_ids for made in run_all(roomy, given, params)]
    block_bytes = roomy.info.kv_cache_bytes // roomy.info.num_blocks
    tight = make_engine(folder, kv_cache_memory_bytes=14 * block_bytes, max_model_len=112)
    force_preemption(tight)
    assert [made.token_ids for made in run_all(tight, given, params)] == expected
    assert tight.stats().num_preemptions > 0


def test_sampling_follows_the_models_distribution_end_to_end(tiny_llama, make_engine):
    """2,000 first tokens of one prompt against softmax of the model's logits, in total variation."""
    folder = tiny_llama()
    engine = make_engine(folder, max_num_seqs=64)
    prompt = [5, 6, 7]
    scored = run_all(engine, [prompt], greedy(1, logprobs=20))[0].logprobs[0]
    made = run_all(engine, [prompt] * 2000, SamplingParams(temperature=1.0, max_tokens=1))
    counts: dict[int, int] = {}
    for collected in made:
        counts[collected.token_ids[0]] = counts.get(collected.token_ids[0], 0) + 1
    for token_id, logprob in scored.top[:5]:
        probability = math.exp(logprob)
        spread = 4 * math.sqrt(probability * (1 - probability) / 2000)
        assert counts.get(token_id, 0) / 2000 == pytest.approx(probability, abs=spread)
