"""Any mixture of requests, forks, beams, drafts, prompt scores, aborts and errors on a pool that is barely enough:
everyone who was promised an output gets its end, a block that is written is nobody else's, and nothing is left."""

import random
from collections import deque

import pytest

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.policy import StepPolicy
from llmq.runtime.request import BeamParams, EngineRequest, TokenLogprobs
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import (
    DraftTerms,
    NewRequest,
    RequestResult,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
)

FULL = KVCacheSpec(1, 8, 8, KV_DTYPES["fp32"])
WINDOW = KVCacheSpec(1, 8, 8, KV_DTYPES["fp32"], window=10)
LAYOUTS = (
    KVCacheLayout((KVCacheGroup(FULL, (0, 1), 4),)),
    KVCacheLayout((KVCacheGroup(WINDOW, (0, 1), 4),)),
    KVCacheLayout((KVCacheGroup(FULL, (0,), 8), KVCacheGroup(WINDOW, (1, 2), 4))),
)
MAX_MODEL_LEN, ARRIVALS = 40, 120  # tokens, steps


class World:
    """Callers, and a runner that makes its results up."""

    def __init__(self, seed: int, depth: int, unseen: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.depth, self.unseen = depth, unseen
        self.layout, self.budget = rng.choice(LAYOUTS), rng.choice([4, 8, 32])
        self.num_blocks = self.layout.blocks_for(MAX_MODEL_LEN, self.budget) + rng.choice([0, 1, 5, 20])
        policy = StepPolicy(
            max_num_seqs=rng.choice([1, 2, 4]),
            max_num_batched_tokens=self.budget,
            drafts=DraftTerms(num_tokens=rng.choice([0, 1, 5])),
            num_lookahead_tokens=rng.choice([0, 5]),
        )
        kv = KVCacheManager(self.layout, self.num_blocks, enable_prefix_caching=rng.random() < 0.8)
        self.scheduler = Scheduler(kv, policy, [2], MAX_MODEL_LEN, depth, unseen=unseen)
        self.in_flight: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self.planned: dict[str, tuple[int, bool]] = {}  # up to where, and whether the next token is being computed
        self.owed: dict[str, EngineRequest] = {}  # names whose end is still to come
        self.tables: dict[str, tuple[NewRequest, list[list[int]]]] = {}
        self.num_added = self.num_unseen = 0

    def add(self, arrival: int) -> None:
        rng, name = self.rng, f"r{self.num_added}"
        self.num_added += 1
        prompt = [rng.randrange(3, 5) for _ in range(rng.randrange(1, 30))]
        forks = [(f"{name}/{index}", index) for index in range(rng.choice([0, 0, 1, 3]))]
        beams = BeamParams(width=2 + len(forks)) if rng.random() < 0.3 else None
        params = {"max_tokens": rng.randrange(1, 12), "ignore_eos": rng.random() < 0.5}
        if not forks and beams is None and rng.random() < 0.4:
            params |= {"prompt_logprobs": 0, "prompt_logprobs_start": rng.randrange(1, len(prompt) + 1)}
            params |= rng.choice([{}, {"max_tokens": 0}])
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(**params),
            forks=forks,
            beams=beams,
            priority=rng.choice([0, 0, 1]),
            tenant=rng.choice("ab"),
            cache_salt=rng.choice(["", "salt"]),
            arrival_time_s=arrival,
        )
        self.scheduler.add_request(request)
        self.owed |= dict.fromkeys(request.names, request)

    def abort(self) -> None:
        name = self.rng.choice(sorted(self.owed))
        request, state = self.owed[name], self.scheduler._requests.get(name)
        # A search ends as a whole, by its first name; so do forks that are not there yet.
        gone = [name]
        if name == request.request_id and (request.beams or (state is not None and state.forks)):
            gone = request.names
        if self.scheduler.abort(name) is not None:
            for one in gone:
                self.owed.pop(one, None)

    def step(self) -> bool:
        """False where nobody computed anything."""
        while len(self.in_flight) < self.depth:
            plan = self.scheduler.schedule()
            assert plan is not None or self.in_flight
            if plan is None:
                break
            assert sum(item.num_scheduled_tokens for item in plan.scheduled) <= self.budget
            self._check_order(plan)
            self._check_blocks(plan)
            results = {item.request_id: self._result(item) for item in plan.scheduled}
            self.in_flight.append((plan, StepResult(results=results)))
        plan, result = self.in_flight.popleft()
        for output in self.scheduler.update_from_output(plan, result):
            if output.finish_reason is not None:
                del self.owed[output.request_id]
        for item in plan.scheduled:
            end = item.num_computed_tokens + item.num_scheduled_tokens
            if item.samples and self.planned.get(item.request_id) == (end, True):
                del self.planned[item.request_id]
        self.scheduler.kv.check_integrity()
        return bool(plan.scheduled)

    def _check_order(self, plan: SchedulerOutput) -> None:
        """Chunks follow each other, and nobody goes on before its next token is known, or known to the runner alone."""
        for new in plan.new_requests:
            self.planned.pop(new.request_id, None)
        assert len(self.scheduler.running) <= self.scheduler.policy.max_num_seqs or self.scheduler._searches
        for item in plan.scheduled:
            start, samples = self.planned.get(item.request_id, (item.num_computed_tokens, False))
            assert start == item.num_computed_tokens
            if samples:
                assert self.unseen
                assert self.scheduler._requests[item.request_id].search is None
                assert not item.draft_token_ids
                self.num_unseen += 1
            self.planned[item.request_id] = (start + item.num_scheduled_tokens, item.samples)

    def _check_blocks(self, plan: SchedulerOutput) -> None:
        for name in plan.forgotten_request_ids:
            del self.tables[name]
        for new in plan.new_requests:
            assert new.request_id not in self.tables
            self.tables[new.request_id] = (new, [[] for _ in self.layout.groups])
        written: list[int] = []
        for item in plan.scheduled:
            tables, end = self.tables[item.request_id][1], item.num_computed_tokens + item.num_scheduled_tokens
            for table, first, ids in zip(tables, item.first_block, item.block_ids, strict=False):
                table[first:] = ids
            for group, table in zip(self.layout.groups, tables, strict=True):
                blocks = range(item.num_computed_tokens // group.block_tokens, -(-end // group.block_tokens))
                written += [table[position] for position in blocks]
        assert len(written) == len(set(written))
        assert all(self.scheduler.kv.pool.blocks[block_id].ref_count == 1 for block_id in written)

    def _result(self, item: ScheduledRequest) -> RequestResult:
        rng, name = self.rng, item.request_id
        request = self.scheduler._requests[name]
        assert item.num_computed_tokens + item.num_scheduled_tokens <= MAX_MODEL_LEN
        assert not item.draft_token_ids or item.samples
        if rng.random() < 0.01:
            return RequestResult(error="it broke")
        if not item.samples:
            return RequestResult()
        if request.search is not None:
            ids = rng.sample(range(2, 60), 2 * request.search.params.width)
            top = [(token_id, -3 * rng.random()) for token_id in ids]
            return RequestResult(token_ids=ids[:1], logprobs=[TokenLogprobs(*top[0], 1, top)])
        forks = {fork: RequestResult(token_ids=[rng.randrange(2, 5)]) for fork, _ in self.tables[name][0].forks}
        accepted = item.draft_token_ids[: rng.randrange(len(item.draft_token_ids) + 1)]
        drafts = [rng.randrange(3, 9) for _ in range(rng.randrange(item.max_draft_tokens + 1))]
        return RequestResult(token_ids=[*accepted, rng.randrange(2, 9)], forks=forks, draft_token_ids=drafts)


@pytest.mark.parametrize(("depth", "unseen"), [(1, False), (2, False), (3, False), (2, True)])
@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_lost_and_nobody_is_forgotten(seed, depth, unseen):
    world = World(seed, depth, unseen)
    num_idle = 0
    for tick in range(5000):
        if tick < ARRIVALS and world.rng.random() < 0.3:
            world.add(tick)
        if world.owed and world.rng.random() < 0.08:
            world.abort()
        if world.scheduler.has_requests:
            num_idle = 0 if world.step() else num_idle + 1
            assert num_idle < 3, "requests wait and nobody is scheduled"
        elif tick >= ARRIVALS:
            break
    scheduler, kv = world.scheduler, world.scheduler.kv
    assert not world.owed
    assert (world.num_unseen > 20) == (unseen and scheduler.policy.drafts.num_tokens == 0)
    assert kv.pool.num_free_blocks == world.num_blocks
    left = (scheduler._requests, scheduler._parents, scheduler._searches, scheduler._known_to_runner, scheduler.running)
    assert not any((*left, len(scheduler.waiting), kv._blocks, kv._announced, kv._being_computed, kv._num_registered))
