"""Tokens drawn by every instruction set: what a sort in float64 draws by the same noise, and what torch draws."""

import random

import numpy as np
import pytest
import torch

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.kernels import native, why_absent
from llmq.runtime.sampling.noise import exponentials
from llmq.runtime.sampling.sampler import Sampler, choose_by_torch
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import NewRequest

pytestmark = pytest.mark.skipif(native is None, reason=f"no native kernels here: {why_absent}")

if native is not None:
    from llmq.runtime.sampling.on_cpu import draw_on_cpu

ISAS = native.isas() if native is not None else ()


@pytest.fixture(params=ISAS)
def isa(request):
    native.force_isa(request.param)
    yield request.param
    native.force_isa(native.native_isa())


def request_of(params: SamplingParams, position: int) -> RunnerRequest:
    new = NewRequest(
        request_id="r", token_ids=[7] * position, num_prompt_tokens=1, sampling_params=params, score_prompt=False
    )
    return RunnerRequest(new, num_groups=1)


def random_request(rng: random.Random) -> RunnerRequest:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 40, 2000]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        seed=rng.getrandbits(63),
    )
    return request_of(params, rng.randrange(1, 50))


def sorted_draw(logits: torch.Tensor, request: RunnerRequest) -> int:
    """By the definition, in float64."""
    params = request.params
    if params.temperature == 0:
        return int(logits.argmax())
    probs, ids = (logits.double() / params.temperature).softmax(0).sort(descending=True, stable=True)
    if params.top_k:
        probs = probs[: params.top_k]
    if params.top_p < 1:
        probs = probs[: int((probs.cumsum(0) < params.top_p * probs.sum()).sum()) + 1]
    probs = probs[probs >= params.min_p * probs[0]]
    ids = ids[: len(probs)]
    noise = exponentials(params.seed, len(request.token_ids), ids.numpy())
    return int(ids[torch.argmax(probs / torch.from_numpy(noise))])


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 4999, 49152])
def test_draws_are_those_of_a_sort(isa, vocab_size):
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    requests = [random_request(rng) for _ in range(60)]
    memory = torch.full((len(requests), vocab_size + 3), torch.nan)  # what lies between rows is not theirs
    logits = memory[:, :vocab_size]
    logits.copy_(torch.randn(logits.shape, generator=generator) * 3)
    token_ids, highest = draw_on_cpu(logits, requests, {})
    assert token_ids == [sorted_draw(row, request) for row, request in zip(logits, requests, strict=True)]
    assert highest == logits.amax(dim=1).tolist()
    assert token_ids == choose_by_torch(logits, requests, {})[0]


def test_a_flat_row_is_drawn_whole(isa):
    """All tokens fall into one bin, in the order of their ids."""
    logits = torch.zeros(1, 3000)
    cut = [request_of(SamplingParams(temperature=1.0, top_p=0.5, seed=seed), 3) for seed in range(200)]
    drawn = [draw_on_cpu(logits, [request], {})[0][0] for request in cut]
    assert drawn == [sorted_draw(logits[0], request) for request in cut]
    assert max(drawn) < 1500
    assert len(set(drawn)) > 150


def test_the_tail_below_the_last_bin_counts(isa):
    """One token far above very many: top-p of nearly all reaches into what lies below 2**-32."""
    logits = torch.full((1, 4000), -25.0)
    logits[0, 17] = 0.0
    request = request_of(SamplingParams(temperature=1.0, top_k=1500, seed=1), 1)
    assert draw_on_cpu(logits, [request], {})[0] == [17]
    logits[0, 17] = -torch.inf
    assert draw_on_cpu(logits, [request], {})[0] == [sorted_draw(logits[0], request)]


def test_the_first_of_equals_and_numbers_that_are_none(isa):
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0))
    logits[0, [300, 511, 999]] = 9.0
    logits[1, 700] = torch.nan
    logits[1, 3] = torch.inf
    logits[2, 998] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 640] = -3.0
    logits[5, 20] = torch.nan
    greedy = [request_of(SamplingParams(temperature=0.0), 1)] * 6
    token_ids, highest = draw_on_cpu(logits, greedy, {})
    assert (token_ids[0], token_ids[4]) == (300, 640)
    assert np.array_equal(highest, logits.amax(dim=1).numpy(), equal_nan=True)
    warm = [request_of(SamplingParams(temperature=1.0, seed=seed), 1) for seed in range(6)]
    made = Sampler([], choose=draw_on_cpu)(logits, warm)
    assert [one.error is None for one in made] == [True, False, False, False, True, False]
    assert made[4].token_ids == [640]


def test_a_temperature_by_which_a_logit_overflows_takes_the_likeliest(isa):
    """The quotient is infinite, and what is taken from it no number."""
    logits = torch.full((3, 1000), -3e38)
    logits[:2, 640] = 3e38
    hot = [request_of(SamplingParams(temperature=0.5, seed=1, **cut), 1) for cut in ({}, {"top_p": 0.9}, {"top_k": 3})]
    assert draw_on_cpu(logits, hot, {})[0] == [640, 640, 0]


def test_an_engine_draws_by_it(tiny_llama, make_engine):
    sampler = make_engine(tiny_llama()).executor.runner.sampler
    assert sampler._choose is draw_on_cpu
