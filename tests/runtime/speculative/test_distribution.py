"""What is sampled behind drafts has the model's distribution: 200,000 tokens against it. A wrong rule is noticed."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from engine_driver import Reference
from scipy.stats import chisquare

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.sampling.sampler import Sampler
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import NewRequest, RequestResult
from llmq.runtime.speculative.verification import sample_with_drafts

VOCAB, PROMPT, LENGTH = 12, [5, 9, 4], 3
NUM_TEXTS, FEW_TEXTS, BATCH = 66_667, 6_000, 1024
TEMPERATURE, TOP_P = 1.2, 0.9


@pytest.fixture(scope="module")
def logits(tiny_llama) -> torch.Tensor:
    """Of a tiny model after every text of up to LENGTH - 1 tokens, [VOCAB + 1] * 2 + [VOCAB]; VOCAB stands for none."""
    model = Reference(tiny_llama(vocab_size=VOCAB))
    table = torch.zeros(VOCAB + 1, VOCAB + 1, VOCAB)
    for first, second in itertools.product(range(VOCAB), range(VOCAB)):
        rows = model.logits([*PROMPT, first, second])[-LENGTH:]
        table[VOCAB, VOCAB], table[first, VOCAB], table[first, second] = 3 * rows
    return table


def distribution(logits: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Of whole texts, computed in float64 from the definition of top-p."""

    def probabilities(row: torch.Tensor) -> np.ndarray:
        p = np.exp(row.double().numpy() / TEMPERATURE)
        p /= p.sum()
        order = np.argsort(-p)
        kept = order[: int(np.searchsorted(np.cumsum(p[order]), TOP_P)) + 1]
        truncated = np.zeros_like(p)
        truncated[kept] = p[kept]
        return truncated / truncated.sum()

    found = {}
    first = probabilities(logits[VOCAB, VOCAB])
    for a in range(VOCAB):
        second = probabilities(logits[a, VOCAB])
        for b in range(VOCAB):
            third = probabilities(logits[a, b])
            for c in range(VOCAB):
                found[a, b, c] = first[a] * second[b] * third[c]
    return found


def write(logits: torch.Tensor, verify, *, num_drafts: int, num_texts: int = NUM_TEXTS) -> Counter:
    """Texts of LENGTH tokens, each with a seed of its own, behind drafts that are drawn without looking."""
    sampler, rng, counts = Sampler(()), np.random.default_rng(1), Counter()
    for begin in range(0, num_texts, BATCH):
        texts = [request(seed) for seed in range(begin, min(begin + BATCH, num_texts))]
        while texts:
            rows, guesses = [], []
            for text in texts:
                left = LENGTH - (len(text.token_ids) - len(PROMPT))
                drafts = rng.integers(0, VOCAB // 2, min(num_drafts, left - 1)).tolist()
                rows += text.with_drafts(drafts)
                guesses += [*drafts, None]
            made = verify(sampler, logits[tuple(zip(*map(context, rows), strict=True))], rows, guesses)
            for text, one in zip(texts, made, strict=True):
                text.token_ids.extend(one.token_ids)
            counts.update(tuple(t.token_ids[len(PROMPT) :]) for t in texts if len(t.token_ids) == LENGTH + len(PROMPT))
            texts = [text for text in texts if len(text.token_ids) < LENGTH + len(PROMPT)]
    return counts


def request(seed: int) -> RunnerRequest:
    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed)
    new = NewRequest(
        request_id=str(seed),
        token_ids=list(PROMPT),
        num_prompt_tokens=len(PROMPT),
        sampling_params=params,
        score_prompt=False,
    )
    return RunnerRequest(new, 1)


def context(row: RunnerRequest) -> list[int]:
    return [*row.token_ids[len(PROMPT) :], VOCAB, VOCAB][: LENGTH - 1]


def likely_enough(sampler, logits, rows, guesses) -> list[RequestResult]:
    """A wrong rule: a draft is kept where the model gives it a tenth ("typical acceptance")."""
    plain = sampler(logits.clone(), rows)
    chance = torch.softmax(logits, dim=-1)
    made, tokens = [], []
    is_kept = True
    for row, guess in enumerate(guesses):
        if is_kept:
            is_kept = guess is not None and float(chance[row, guess]) > 0.1
            tokens.append(guess if is_kept else plain[row].token_ids[0])
        if guess is None:
            made.append(RequestResult(token_ids=tokens))
            tokens, is_kept = [], True
    return made


def p_value(counts: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """Texts that are expected fewer than five times are counted as one."""
    total = sum(counts.values())
    common = [text for text, share in expected.items() if share * total >= 5]
    seen, awaited = [counts[text] for text in common], [expected[text] * total for text in common]
    if (rest := total - sum(awaited)) > 1e-6 * total:
        seen, awaited = [*seen, total - sum(seen)], [*awaited, rest]
    assert sum(seen) == total, "texts that cannot be"
    return float(chisquare(seen, np.array(awaited) * total / sum(awaited)).pvalue)


def test_texts_have_the_models_distribution(logits):
    counts = write(logits, sample_with_drafts, num_drafts=2)
    assert sum(counts.values()) == NUM_TEXTS
    assert p_value(counts, distribution(logits)) > 0.01


def test_a_wrong_rule_of_acceptance_is_noticed(logits):
    counts = write(logits, likely_enough, num_drafts=2, num_texts=FEW_TEXTS)
    assert p_value(counts, distribution(logits)) < 1e-6


def test_a_seed_gives_the_same_text_with_and_without_drafts(logits):
    plain, behind_drafts = (
        write(logits, sample_with_drafts, num_drafts=count, num_texts=FEW_TEXTS) for count in (0, 2)
    )
    assert plain == behind_drafts
    assert p_value(plain, distribution(logits)) > 0.01
