import math
import weakref

import pytest
import torch

from llmq.evals.divergence import evaluate_divergence, measure_positions
from llmq.evals.perplexity import TextCounts, evaluate_perplexity
from llmq.evals.windows import plan_windows
from llmq.profiles.errors import FailedError, InputError

TOKENS = [(7 * i * i + 3 * i) % 50 for i in range(101)]
COUNTS = TextCounts(num_tokens=101, num_words=60, num_bytes=400)


def test_measures_of_two_hand_made_distributions():
    base = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    cand = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log() + 3.0  # a constant shift changes no probability
    measures = measure_positions(base, cand, torch.tensor([0, 2]))
    assert measures.kl.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0.0], abs=1e-6)
    assert measures.same_top1.tolist() == [False, True]
    assert measures.baseline_nll.tolist() == pytest.approx([math.log(2), math.log(10)])
    assert measures.candidate_nll.tolist() == pytest.approx([math.log(4), math.log(10)])


def test_a_model_does_not_diverge_from_itself(toy_engine):
    result = evaluate_divergence(toy_engine(), toy_engine(chunk_tokens=5), TOKENS, plan_windows(101, 20), COUNTS)
    assert (result.mean_kl, result.max_kl, result.top1_agreement) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("stride", [None, 12])
def test_two_models_in_lockstep_equal_the_direct_computation_whatever_their_chunks(toy_engine, stride):
    base, cand = toy_engine(seed=0, chunk_tokens=7), toy_engine(seed=1, chunk_tokens=11)
    plan = plan_windows(101, 30, stride)
    result = evaluate_divergence(base, cand, TOKENS, plan, COUNTS)

    scored = [i for w in plan.windows for i in range(w.first_scored, w.end)]
    kl = torch.nn.functional.kl_div(cand.log_probs, base.log_probs, log_target=True, reduction="none").sum(-1)
    kl = kl[[TOKENS[i - 1] for i in scored]]
    same = (base.table.argmax(-1) == cand.table.argmax(-1))[[TOKENS[i - 1] for i in scored]]
    assert result.num_positions == len(scored)
    assert result.mean_kl == pytest.approx(float(kl.mean()), rel=1e-5)
    assert result.max_kl == pytest.approx(float(kl.max()), rel=1e-5)
    assert result.p99_kl == pytest.approx(float(kl.sort().values[math.ceil(0.99 * len(kl)) - 1]), rel=1e-5)
    assert result.top1_agreement == pytest.approx(float(same.float().mean()))
    for engine, measured in ((base, result.baseline), (cand, result.candidate)):
        assert measured.token_ppl == pytest.approx(evaluate_perplexity(engine, TOKENS, plan, COUNTS).token_ppl)
        assert not engine.requests


def test_no_more_than_one_chunk_of_each_engine_is_alive(toy_engine):
    alive: set[int] = set()
    most = 0

    class Watched(type(toy_engine())):
        def observe_logits(self, callback):
            def watch(request_id, start, logits):
                nonlocal most
                chunk = logits.clone()
                alive.add(id(chunk))
                weakref.finalize(chunk, alive.discard, id(chunk))
                most = max(most, len(alive))
                callback(request_id, start, chunk)

            super().observe_logits(watch if callback else None)

    engines = [Watched(toy_engine(seed=i).table, chunk_tokens=5 + i) for i in range(2)]
    evaluate_divergence(*engines, TOKENS, plan_windows(101, 50), COUNTS)
    assert most <= 3  # one of each, and the next of one side while the other's last is still compared


def test_different_vocabularies_are_refused(toy_engine):
    with pytest.raises(InputError, match="50 words and the candidate 51"):
        evaluate_divergence(toy_engine(50), toy_engine(51), TOKENS, plan_windows(101, 20), COUNTS)


def test_logits_that_are_not_finite_are_named_and_leave_the_engines_empty(toy_engine):
    base, cand = toy_engine(), toy_engine()
    cand.table[25] = math.nan
    with pytest.raises(FailedError, match="candidate's logits are not finite at token 5 of window 1"):
        evaluate_divergence(base, cand, list(range(50)), plan_windows(50, 20), COUNTS)
    assert not base.requests
    assert not cand.requests
