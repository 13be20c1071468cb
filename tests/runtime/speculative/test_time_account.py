"""That speculation never loses more than a little, however seldom it is right: by simulation, in a time of its own."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paced_scheduler import LAYOUT

from llmq.profiles.step_cost import ROW_KNOTS, StepCost, StepCostModel, StepShape
from llmq.runtime.batch import RunnerRequest
from llmq.runtime.policy import StepPolicy
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import DraftPrices, DraftTerms, NewRequest, RequestResult, ScheduledRequest
from llmq.runtime.speculative.account import FIRST_STEPS, SHARE, WATCHED, TimeAccount
from llmq.runtime.speculative.drafter import Acceptance
from llmq.runtime.speculative.guesses import Guesser
from llmq.runtime.speculative.model_drafter import ModelDrafter
from llmq.runtime.speculative.ngram import NgramDrafter, _Text
from llmq.runtime.speculative.pass_price import PassPrice
from llmq.runtime.speculative.policy import DraftPolicy
from llmq.runtime.trial_steps import GUESSED_BATCHES, GUESSED_TOKENS

WORDS, MOST = 8, 8
# Seconds by rows: a kernel's tile of four, a line, and arithmetic that is the limit from the first row on.
COSTS = {
    "tiles": StepCost(0.094, 0.009, 0.0, 0.0, 0.0, tuple(0.0 if knot < 4 else 0.009 for knot in ROW_KNOTS[:-1])),
    "line": StepCost(0.010, 0.0005, 0.0001, 0.0, 0.0),
    "computes": StepCost(0.001, 0.010, 0.0, 0.0, 0.0),
}


def bursts(length: int) -> Callable[[int], float]:
    return lambda step: 0.9 if step // length % 2 == 0 else 0.0


CHANCES: dict[str, Callable[[int], float]] = {
    "never": lambda step: 0.0,
    "seldom": lambda step: 0.25,
    "once": lambda step: 0.9 if step < 60 else 0.0,
    "less and less": lambda step: max(0.0, 0.8 - step / 200),
    "short bursts": bursts(7),
    "long bursts": bursts(70),
}


@dataclass
class World:
    """Requests that decode `batch` at once; whoever has his answer makes room for another. A drafter guesses, and its
    next guess is right with chance(step)."""

    cost: StepCost
    batch: int
    chance: Callable[[int], float]
    drafter: object = None
    prompt: int = 20
    answer: int = 10_000
    seed: int = 0
    now_s: float = 0.0
    guessing_s: float = 0.0  # that the drafter's passes took, to be added to the time
    num_tokens: int = 0
    requests: list[RunnerRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self._numbers = random.Random(self.seed), iter(range(10**6))
        self.requests = [self._request() for _ in range(self.batch)]
        self._model = StepCostModel(self.cost)
        self._policy = DraftPolicy(MOST, self._model)
        self._scheduler = SimpleNamespace(running=[], waiting=[], num_draft_tokens=0, num_accepted_tokens=0)
        self._drafts: list[list[int]] = [[] for _ in self.requests]
        self._num_steps = 0

    @property
    def plain_s(self) -> float:
        return self.cost.step_s(StepShape.decode(self.batch, 0))

    @property
    def off_s(self) -> float:
        """What as many tokens take without guesses."""
        return self.num_tokens / self.batch * self.plain_s

    def run(self, num_steps: int) -> "World":
        most = StepPolicy(max_num_seqs=64, max_num_batched_tokens=512, drafts=DraftTerms(num_tokens=MOST))
        scheduler, drafts = self._scheduler, self._drafts
        for step in range(self._num_steps, self._num_steps + num_steps):
            scheduler.running = [
                SimpleNamespace(num_tokens=n, num_tokens_to_compute=n, num_computed_tokens=n - 1)
                for n in (len(request.token_ids) for request in self.requests)
            ]
            terms = self._policy.next_step(most, scheduler).drafts
            rows = self.batch + sum(map(len, drafts))
            step_s = self.cost.step_s(StepShape(rows, rows, 0, 0))
            items = []
            for index, draft in enumerate(drafts):
                items.append(self._answer(index, draft, step, scheduler))
            self.guessing_s = 0.0
            drafts = self.drafter.propose(items, self.requests, terms)
            self._model.observe(StepShape(rows, rows, 0, 0), step_s)
            self._policy.observe(step_s, self.guessing_s)
            self.now_s += step_s + self.guessing_s
        self._drafts, self._num_steps = drafts, self._num_steps + num_steps
        return self

    def _answer(self, index: int, draft: list[int], step: int, scheduler: SimpleNamespace) -> ScheduledRequest:
        """What a request's step brings: the drafts that are right, and a token."""
        request, accepted = self.requests[index], 0
        computed = len(request.token_ids) - 1
        expected = [*draft, *self._guess_of(request)[len(draft) :]] or [0]
        for guess in expected:
            is_right = self.rng.random() < self.chance(step)
            request.token_ids.append(guess if is_right else (guess + 1) % WORDS)
            if not is_right or accepted == len(draft):
                break
            accepted += 1
        else:
            request.token_ids.append(0)
        scheduler.num_draft_tokens += len(draft)
        scheduler.num_accepted_tokens += accepted
        self.num_tokens += accepted + 1
        if len(request.token_ids) >= self.prompt + self.answer:
            self.drafter.forget(request.request_id)
            request = self.requests[index] = self._request()
            computed = len(request.token_ids) - 1
        request.block_ids = [list(range(len(request.token_ids) // 16 + 2))]
        return ScheduledRequest(
            request_id=request.request_id,
            num_computed_tokens=computed,
            num_scheduled_tokens=len(request.token_ids) - 1 - computed or 1,
            samples=True,
            max_draft_tokens=MOST,
        )

    def _guess_of(self, request: RunnerRequest) -> list[int]:
        """What the drafter expects to come, verified or not."""
        text = self.drafter._texts.get(request.request_id)
        if text is None:
            return []
        return text.guess if isinstance(self.drafter, NgramDrafter) else text.draft.guess.token_ids

    def _request(self) -> RunnerRequest:
        token_ids = [self.rng.randrange(WORDS) for _ in range(self.prompt)]
        new = NewRequest(
            request_id=str(next(self._numbers)),
            token_ids=token_ids,
            num_prompt_tokens=self.prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=self.answer),
            score_prompt=False,
        )
        request = RunnerRequest(new, 1)
        request.block_ids = [list(range(self.prompt // 16 + 2))]
        return request


@dataclass
class Passes:
    """Of a drafter: a pass takes a share of a step of as many tokens. Names word 5, more or less surely."""

    world: World
    share: float
    name = "simulation"

    def run(self, spans, features=None):
        count = sum(len(span.token_ids) for span in spans)
        self.world.guessing_s += self.share * self.world.cost.step_s(StepShape(count, count, 0, 0))
        logits = torch.zeros(sum(span.is_named for span in spans), WORDS)
        for row in logits:
            row[5] = self.world.rng.uniform(0.0, 5.0)
        return None, logits if len(logits) else None


def greedy(logits, views):
    return [RequestResult(token_ids=[int(row.argmax())]) for row in logits]


def with_passes(share: float, **given_to) -> World:
    """A model guesses, whose passes take `share` of the model's steps."""
    world = World(**given_to)
    world.drafter = ModelDrafter(Passes(world, share), LAYOUT, Guesser(greedy, WORDS))
    price = world.drafter._price = PassPrice(lambda: world.now_s + world.guessing_s)
    for batch in GUESSED_BATCHES:  # the engine's trial
        for count in (GUESSED_TOKENS * batch, batch):
            price.observe(count, share * world.cost.step_s(StepShape(count, count, 0, 0)))
    # A new request's prompt is not in the prefix cache: the drafter has read nothing of it.
    follow = world.drafter._follow
    world.drafter._follow = lambda item, request: (
        world.drafter._texts.setdefault(request.request_id, _unread()) and follow(item, request)
    )
    return world


def _unread():
    from llmq.runtime.speculative.pass_drafter import Followed

    return Followed(0)


def with_ngrams(**given_to) -> World:
    return World(drafter=NgramDrafter(), **given_to)


def assert_bounded(world: World) -> None:
    # A pass may be dearer than it was thought to be, once.
    most_s = (1 + WATCHED + SHARE) * world.off_s + (FIRST_STEPS + 2) * world.plain_s
    assert world.now_s <= most_s, (world.now_s / world.plain_s, world.off_s / world.plain_s)


SLOW = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
ANY = {
    "cost": st.sampled_from(sorted(COSTS)),
    "batch": st.sampled_from([1, 2, 3, 4, 5, 8, 16, 33, 64]),
    "chance": st.sampled_from(sorted(CHANCES)),
    "seed": st.integers(0, 1000),
}


@SLOW
@given(**ANY)
def test_ngrams_that_are_wrong_cost_next_to_nothing(cost, batch, chance, seed):
    world = with_ngrams(cost=COSTS[cost], batch=batch, chance=CHANCES[chance], seed=seed)
    assert_bounded(world.run(200))


@SLOW
@given(**ANY, share=st.sampled_from([0.05, 0.3, 0.7]), prompt=st.sampled_from([4, 200]))
def test_a_model_that_is_wrong_costs_little(cost, batch, chance, seed, share, prompt):
    parts = {"cost": COSTS[cost], "batch": batch, "chance": CHANCES[chance], "seed": seed}
    assert_bounded(with_passes(share, prompt=prompt, answer=60, **parts).run(200))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("cost", ["tiles", "line"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_account_bounds_what_a_drafter_loses_that_is_always_sure(monkeypatch, cost, batch, share):
    monkeypatch.setattr(Acceptance, "lower", lambda self, level: 0.8)
    monkeypatch.setattr(_Text, "repeats", 1.0)
    parts = {"cost": COSTS[cost], "batch": batch, "chance": CHANCES["never"]}

    def run() -> World:
        world = with_passes(share, **parts) if share else with_ngrams(**parts)
        return world.run(150)

    world = run()
    assert_bounded(world)
    assert world.now_s > world.off_s + 0.5 * FIRST_STEPS * world.plain_s  # it did spend it
    monkeypatch.setattr(TimeAccount, "spare_s", lambda self, plain_s: 1e9)
    with pytest.raises(AssertionError):
        assert_bounded(run())


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("cost", ["tiles", "line"])
def test_rows_that_cost_more_than_is_believed_are_paid_for(monkeypatch, cost, batch):
    monkeypatch.setattr(Acceptance, "lower", lambda self, level: 0.8)
    monkeypatch.setattr(_Text, "repeats", 1.0)
    rows_more_s = StepCost.rows_more_s
    monkeypatch.setattr(StepCost, "rows_more_s", lambda *given_to: 0.5 * rows_more_s(*given_to))

    def run() -> World:
        return with_ngrams(cost=COSTS[cost], batch=batch, chance=CHANCES["never"]).run(200)

    world = run()
    assert_bounded(world)
    assert world.now_s > world.off_s + 0.5 * FIRST_STEPS * world.plain_s
    monkeypatch.setattr(DraftPolicy, "_verified_s", lambda self, drafted: self._prices.rows_s[drafted])
    with pytest.raises(AssertionError):
        assert_bounded(run())


def best_fixed(world: World, chance: float, share: float) -> float:
    """Seconds a token of the best number of guesses for all, made each step."""
    best = world.plain_s / world.batch
    for depth in range(1, MOST + 1):
        given_tokens = sum(chance**n for n in range(depth + 1))
        rows = world.batch * (depth + 1)
        passes_s = depth * share * world.cost.step_s(StepShape.decode(world.batch, 0))
        step_s = world.cost.step_s(StepShape(rows, rows, 0, 0)) + (passes_s if share else 0.0)
        best = min(best, step_s / (world.batch * given_tokens))
    return best


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.6, 0.9])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_where_guesses_are_right_it_comes_near_the_best_fixed_number(cost, batch, chance, share):
    """Of requests that go on, after as many steps as it takes to learn how often they are right."""
    parts = {"cost": COSTS[cost], "batch": batch, "chance": lambda step: chance}
    world = with_passes(share, **parts) if share else with_ngrams(**parts)
    world.run(100)
    token_s = world.plain_s / world.batch / speed_of(world, 250)
    assert token_s <= 1.13 * best_fixed(world, chance, share)
    assert_bounded(world)


def speed_of(world: World, num_steps: int) -> float:
    """Against no guesses, from now on."""
    began_s, before = world.now_s, world.num_tokens
    world.run(num_steps)
    return (world.num_tokens - before) / world.batch * world.plain_s / (world.now_s - began_s)


def test_a_price_that_was_too_high_is_not_believed_for_ever():
    world = with_passes(0.3, cost=COSTS["tiles"], batch=1, chance=lambda step: 0.9)
    for _ in range(50):  # the machine was busy
        world.drafter._price.observe(1, 1.5 * world.plain_s)
    assert speed_of(world, 50) == pytest.approx(1.0)
    world.run(400)
    assert speed_of(world, 100) > 1.5


def test_guesses_are_as_deep_as_it_takes_to_repay_the_rows_of_the_first():
    """The first row more costs as much as five do: one guess alone would not be worth it."""
    rows = (0.0, 0.04, 0.04, 0.04, 0.04, 0.04)
    terms = DraftTerms(num_tokens=5, prices=DraftPrices(token_s=0.05, rows_s=rows, plain_s=0.05, spare_s=9.0))
    price, guesser = PassPrice(), Guesser(greedy, WORDS)
    for _ in range(20):
        price.observe(1, 0.02)
        guesser._first.count(0, True)
    world = World(cost=COSTS["line"], batch=1, chance=lambda step: 1.0)
    draft = guesser.begin(world.requests[0], 5)
    assert guesser.worth_more([draft], price, terms, 0.0) == [draft]
    shallow = guesser.begin(world.requests[0], 1)
    assert guesser.worth_more([shallow], price, terms, 0.0) == []


@pytest.mark.parametrize("cost", ["tiles", "line"])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(("before", "after"), [(0.8, 0.1), (0.8, 0.35), (0.6, 0.2)])
def test_what_one_kind_of_text_has_taught_is_not_believed_of_the_next(cost, batch, before, after):
    """Of 100 steps after 150 in which guesses were right: though there are gains to lose, few are lost."""
    lost, num_worlds = 0.0, 4
    for seed in range(num_worlds):
        world = with_ngrams(
            cost=COSTS[cost], batch=batch, seed=seed, chance=lambda step: before if step < 150 else after
        )
        world.run(150)
        began_s, num_tokens = world.now_s, world.num_tokens
        world.run(100)
        off_s = (world.num_tokens - num_tokens) / batch * world.plain_s
        lost += (world.now_s - began_s - off_s) / world.plain_s / num_worlds
    assert lost < 6.5


def test_a_guess_that_was_always_right_may_fail():
    acceptance = Acceptance([1.0])
    acceptance._recent = [0.5]  # the share is 1: no likelihood is left for what is seen
    acceptance.count(0, True)
    assert acceptance.share(0) == pytest.approx(0.5, abs=0.05)


def test_an_account_gives_no_more_than_it_was_given():
    account, spent_s, saved_s, rng = TimeAccount(), 0.0, 0.0, random.Random(0)
    for step in range(5000):
        pays = rng.uniform(0.0, max(0.0, account.spare_s(1.0)))
        saved = rng.choice([0.0, 0.0, 0.5, 5.0]) if step < 1000 else 0.0
        spent_s, saved_s = spent_s + pays, saved_s + saved
        account.book(1.0, saved_s=saved, guessing_s=0.0, rows_s=pays)
        assert spent_s <= saved_s + FIRST_STEPS + SHARE * (step + 1) + 1e-9
    assert account.spare_s(1.0) < 1.0


def test_watching_is_not_booked_and_idleness_does_not_stop_guesses():
    account = TimeAccount()
    for _ in range(1000):
        account.book(1.0, saved_s=0.0, guessing_s=WATCHED, rows_s=0.0)
    assert account.spare_s(1.0) > FIRST_STEPS
