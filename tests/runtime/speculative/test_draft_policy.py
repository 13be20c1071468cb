"""When speculation is worth it: by simulation against the best fixed number of drafts."""

import pytest
from drafters import KnowingDrafter, use
from engine_driver import greedy, run_all
from paced_scheduler import LAYOUT, MOST, Served

from llmq.profiles.errors import InputError
from llmq.profiles.slo import Slo
from llmq.profiles.step_cost import StepCost, StepCostModel
from llmq.runtime.config import Speculation
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.pacer import Pacer
from llmq.runtime.policy import StepPolicy, step_shape
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import DraftTerms, RequestResult, StepResult
from llmq.runtime.speculative.policy import DraftPolicy

READS_WEIGHTS = StepCost(fixed_s=0.010, token_s=0.0005, sequence_s=0.0001, context_token_s=0.0, pair_s=0.0)
COMPUTES = StepCost(fixed_s=0.001, token_s=0.010, sequence_s=0.0, context_token_s=0.0, pair_s=0.0)
NUM_STEPS = 150


def tokens_per_second(cost: StepCost, batch: int, chance: float, num_drafts: int | None) -> float:
    """Of requests whose drafts are right with `chance` each, one after the other. None: DraftPolicy decides."""
    model, now_s = StepCostModel(cost), 0.0
    drafts = DraftTerms(num_tokens=num_drafts or 0)
    most = StepPolicy(max_num_seqs=64, max_num_batched_tokens=4096, drafts=drafts)
    policy = DraftPolicy(8, model) if num_drafts is None else None
    pacer = Pacer(model, most, lambda: now_s, drafts=policy)
    scheduler = Scheduler(KVCacheManager(LAYOUT, 4096, False), most, [2], 4096)
    for index in range(batch):
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        scheduler.add_request(EngineRequest(request_id=str(index), prompt_token_ids=[5], sampling_params=params))
    debt = [0.0] * batch  # of fractions of accepted tokens: no chance, so that runs compare
    made = 0
    for _ in range(NUM_STEPS):
        pacer.begin_step(scheduler)
        plan = scheduler.schedule()
        results = {}
        for item in plan.scheduled:
            index, count = int(item.request_id), len(item.draft_token_ids)
            debt[index] += sum(chance**n for n in range(1, count + 1))
            accepted = min(count, int(debt[index]))
            debt[index] -= accepted
            worth = sum(chance**n >= plan.drafts.least_chance for n in range(1, item.max_draft_tokens + 1))
            results[item.request_id] = RequestResult(token_ids=[9] * (accepted + 1), draft_token_ids=[9] * worth)
            made += accepted + 1
        now_s += cost.step_s(step_shape(plan))
        pacer.end_step(plan, goes_on=True)
        scheduler.update_from_output(plan, StepResult(results=results))
    return made / now_s


@pytest.mark.parametrize("cost", [READS_WEIGHTS, COMPUTES], ids=["reads weights", "computes"])
@pytest.mark.parametrize("batch", [1, 4, 16, 48])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_it_is_near_the_best_fixed_number_and_never_slower_than_off(cost, batch, chance):
    off = tokens_per_second(cost, batch, chance, 0)
    best = max(off, *(tokens_per_second(cost, batch, chance, count) for count in (1, 2, 4, 8)))
    adaptive = tokens_per_second(cost, batch, chance, None)
    assert adaptive >= 0.985 * off
    assert adaptive >= 0.93 * best


def test_it_turns_itself_off_where_arithmetic_is_the_limit():
    policy = DraftPolicy(8, StepCostModel(COMPUTES))
    assert policy.terms([100] * 16).least_chance > 0.99
    assert DraftPolicy(8, StepCostModel(READS_WEIGHTS)).terms([100]).least_chance < 0.06


def test_adaptive_speculation_in_an_engine_changes_no_token(tiny_llama, make_engine):
    folder, given = tiny_llama(), [[5 + index, 9, 13, 5 + index, 9] for index in range(6)]
    plain = run_all(make_engine(folder), given, greedy(60))
    engine = make_engine(folder, speculation=Speculation(method="ngram", num_tokens=8, adaptive=True))
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(given, plain, strict=True)]
    drafter = KnowingDrafter(texts, 512, 0.9)
    made = run_all(use(engine, drafter), given, greedy(60))
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]
    assert engine.stats().draft_tokens > 0


def test_under_an_slo_nothing_is_guessed_while_a_prompt_waits_for_its_part_of_the_step():
    served = Served("tpot=60ms")
    drafts = DraftPolicy(8, served.policy.model)
    pacer = Pacer(served.policy.model, MOST, lambda: 0.0, slo=served.policy, drafts=drafts)
    served.add("a", 8)
    served.step()
    pacer.begin_step(served.scheduler)
    assert served.scheduler.policy.drafts.num_tokens == 8
    served.add("b", 2000)
    pacer.begin_step(served.scheduler)
    assert served.scheduler.policy.max_num_batched_tokens < MOST.max_num_batched_tokens
    assert served.scheduler.policy.drafts.num_tokens == 0


def test_under_an_slo_a_fixed_number_is_guessed_as_asked(tiny_llama, make_engine):
    folder, given = tiny_llama(), [[5 + index, 9, 13, 5 + index, 9] for index in range(3)]
    plain = run_all(make_engine(folder), given, greedy(40))
    speculation = Speculation(method="ngram", num_tokens=3)
    engine = make_engine(folder, speculation=speculation, slo=Slo.parse("tpot=10s"))
    assert engine.scheduler.policy.drafts == DraftTerms(num_tokens=3)
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(given, plain, strict=True)]
    made = run_all(use(engine, KnowingDrafter(texts, 512)), given, greedy(40))
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]
    assert engine.stats().accepted_draft_tokens == engine.stats().draft_tokens > 0


def test_heads_and_models_that_guess_are_refused_under_an_slo(tiny_llama, make_engine, tmp_path):
    for method in ("draft", "eagle", "medusa"):
        speculation = Speculation(method=method, draft_model=str(tmp_path))
        with pytest.raises(InputError, match="--slo does not plan for what a drafter takes"):
            make_engine(tiny_llama(), speculation=speculation, slo=Slo.parse("tpot=10s"))
