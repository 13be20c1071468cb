"""When speculation is worth it: by simulation against the best fixed number of drafts."""

import msgspec
import pytest
from drafters import KnowingDrafter, use
from engine_driver import greedy, run_all
from paced_scheduler import COST, LAYOUT, MOST, Served

from llmq.profiles.slo import Slo
from llmq.profiles.step_cost import StepCost, StepCostModel, StepShape
from llmq.runtime.config import Speculation
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.pacer import Pacer
from llmq.runtime.policy import StepPolicy, step_shape
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import DraftTerms, RequestResult, StepResult
from llmq.runtime.speculative.pass_price import PassPrice
from llmq.runtime.speculative.policy import DraftPolicy
from llmq.runtime.speculative.worth import num_worth

READS_WEIGHTS = StepCost(fixed_s=0.010, token_s=0.0005, sequence_s=0.0001, context_token_s=0.0, pair_s=0.0)
COMPUTES = StepCost(fixed_s=0.001, token_s=0.010, sequence_s=0.0, context_token_s=0.0, pair_s=0.0)
NUM_STEPS = 150


def tokens_per_second(cost: StepCost, batch: int, chance: float, num_drafts: int | None) -> float:
    """Of requests whose drafts are right with `chance` each, one after the other. None: DraftPolicy decides."""
    model, now_s = StepCostModel(cost), 0.0
    drafts = DraftTerms(num_tokens=8 if num_drafts is None else num_drafts)
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
            results[item.request_id] = RequestResult(token_ids=[9] * (accepted + 1))
            made += accepted + 1
        chances = [[chance**n for n in range(1, item.max_draft_tokens + 1)] for item in plan.scheduled]
        for item, worth in zip(plan.scheduled, num_worth(chances, plan.drafts), strict=True):
            results[item.request_id] = msgspec.structs.replace(results[item.request_id], draft_token_ids=[9] * worth)
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
    assert least_chance(DraftPolicy(8, StepCostModel(COMPUTES)), 16) > 0.99
    assert least_chance(DraftPolicy(8, StepCostModel(READS_WEIGHTS)), 1) < 0.06


def least_chance(policy: DraftPolicy, batch: int) -> float:
    """That repays a row more."""
    prices = policy.prices([100] * batch)
    return prices.rows_s[1] / prices.token_s


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
    most = msgspec.structs.replace(MOST, drafts=DraftTerms(num_tokens=8))
    served = Served("tpot=60ms", most=most)
    drafts = DraftPolicy(8, served.policy.model)
    pacer = Pacer(served.policy.model, most, lambda: 0.0, slo=served.policy, drafts=drafts)
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


def under_slo(slo: str, *, count: int = 2, num_drafts: int = 0) -> DraftTerms:
    """What is guessed where `count` sequences decode, which verify `num_drafts` guesses each."""
    most = msgspec.structs.replace(MOST, drafts=DraftTerms(num_tokens=8))
    served = Served(slo, most=most)
    for index in range(count):
        served.add(str(index), 8)
    served.step()
    for request in served.scheduler.running:
        request.draft_token_ids = [9] * num_drafts
    return served.policy.next_step(served.scheduler).drafts


def test_under_an_slo_guessing_has_the_time_that_the_step_leaves():
    free, busy = under_slo("tpot=200ms"), under_slo("tpot=200ms", num_drafts=4)
    assert free.num_tokens == 8
    row_s = COST.token_s + COST.sequence_s + COST.pair_s * 9
    assert free.most_s - busy.most_s == pytest.approx(8 * row_s)
    assert 0.0 < busy.most_s < free.most_s < 0.2
    assert under_slo("tpot=200ms", count=6).most_s < free.most_s
    assert under_slo("ttft=5s").most_s == float("inf")
    tight = COST.step_s(StepShape.decode(1, 9)) + 2.5 * row_s  # two rows more, and no third
    tight *= Served("tpot=1s").policy.spread
    assert under_slo(f"tpot={1000 * tight}ms", count=1).num_tokens == 2


def test_a_pass_that_does_not_fit_is_not_begun_and_tried_again_later():
    price = PassPrice()
    assert price.tokens_within(1.0, 512) == 32  # nothing is known yet
    for _ in range(20):
        price.observe(1, 0.010)
        price.observe(100, 0.109)
    assert price.seconds(1) == pytest.approx(0.010, rel=0.02)
    assert price.seconds(16) == pytest.approx(0.025, rel=0.02)
    assert price.tokens_within(0.0595, 512) in (50, 51)
    assert price.tokens_within(float("inf"), 512) == 512
    assert price.tokens_within(0.0, 512) == 0
    assert any(price.fits(1, 0.005) for _ in range(100))


def test_hope_that_a_pass_has_become_cheaper_spends_no_more_than_it_was_measured_to_take():
    price = PassPrice()
    for _ in range(5):
        price.observe(1, 0.010)
    for _ in range(200):
        price.wait()
    assert price.seconds(1) < 0.007
    assert price.measured_s(1) == pytest.approx(0.010)
    price.observe(1, 0.010)
    assert price.seconds(1) == pytest.approx(0.010)


def test_a_pass_over_more_rows_is_dearer_before_it_was_seen():
    price = PassPrice()
    for _ in range(5):
        price.observe(1, 0.012)
    assert price.seconds(1) == pytest.approx(0.012)
    assert price.seconds(13) == pytest.approx(2 * 0.012 * 13 / 13, rel=0.1)


@pytest.mark.parametrize("adaptive", [False, True])
def test_under_an_slo_models_guess_within_their_time(tiny_llama, make_engine, adaptive):
    folder, given = tiny_llama(), [[5 + index, 9, 13, 5 + index, 9] for index in range(3)]
    plain = run_all(make_engine(folder), given, greedy(40))
    for chosen in ({"draft_model": str(folder)}, {"draft_layers": 1}):
        speculation = Speculation(method="draft", num_tokens=3, adaptive=adaptive, **chosen)
        engine = make_engine(folder, speculation=speculation, slo=Slo.parse("tpot=100s"))
        made = run_all(engine, given, greedy(40))
        assert [one.token_ids for one in made] == [one.token_ids for one in plain]
        if not adaptive:  # else what is worth a guess is the machine's to say
            assert engine.stats().draft_tokens > 0
        engine.pacer.slo._tpot_s = 0.0  # no time is left beside a step
        before = engine.stats().draft_tokens
        assert [one.token_ids for one in run_all(engine, given, greedy(40))] == [one.token_ids for one in plain]
        assert engine.stats().draft_tokens == before
