"""The Engine under an SLO on a simulated machine, with a clock that its steps move: the same on every run."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from bench_simulation import EOS, H100_8B, OTHER, one_group

from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.load.metrics import RequestRecord
from llmq.profiles.slo import Slo
from llmq.profiles.step_cost import StepCost
from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.memory import KVCachePlan
from llmq.runtime.pacer import Pacer
from llmq.runtime.policy import StepPolicy, step_shape
from llmq.runtime.request import EngineInfo, EngineRequest, RequestOutput
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import RequestResult, ScheduledRequest, SchedulerOutput, StepResult
from llmq.runtime.trial_steps import run_trial, slo_policy_of

VOCAB_SIZE = 30_000
MAX_TOKENS = 1024  # asked for by every simulated request: when it ends is not foreseen


@dataclass(frozen=True)
class Machine:
    """What is simulated: the true cost of a step, the noise on it, and a promise that suits it."""

    name: str
    cost: StepCost
    slo: Slo
    length_scale: float
    capacity_tokens: int
    noise: float = 0.1


SMALL_CPU = StepCost(fixed_s=0.020, token_s=0.0009, sequence_s=0.003, context_token_s=3e-6, pair_s=8e-7)
MACHINES = (
    Machine(
        "H100, 8B",
        H100_8B,
        Slo.parse("ttft=2s,tpot=15ms@p99"),
        length_scale=1.0,
        capacity_tokens=400_000,
    ),
    Machine(
        "a CPU, 135M",
        SMALL_CPU,
        Slo.parse("ttft=5s,tpot=120ms@p99"),
        length_scale=0.125,
        capacity_tokens=65_536,
    ),
)


class SimulatedExecutor:
    """Runs a plan at once, and moves the clock by what it would have taken. A request ends with EOS after as many
    tokens as its arrival says, a trial's never."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.now_s = 0.0
        self.num_tokens: dict[str, int] = {}
        self._machine = machine
        self._noise = random.Random(seed)

    def submit(self, plan: SchedulerOutput) -> "Future[StepResult]":
        sigma = self._machine.noise
        if plan.scheduled:
            self.now_s += self._machine.cost.step_s(step_shape(plan)) * self._noise.lognormvariate(
                -(sigma**2) / 2, sigma
            )
        future: Future[StepResult] = Future()
        future.set_result(StepResult(results={one.request_id: self._result(one) for one in plan.scheduled}))
        return future

    def _result(self, item: ScheduledRequest) -> RequestResult:
        if not item.samples:
            return RequestResult()
        left = self.num_tokens.get(item.request_id, MAX_TOKENS)
        self.num_tokens[item.request_id] = left - 1
        return RequestResult(token_ids=[EOS if left <= 1 else OTHER])


def simulate(machine: Machine, arrivals: Sequence[Arrival], slo: Slo | None, *, seed: int = 0) -> list[RequestRecord]:
    """What the clients of `arrivals` see, with `--slo` or without."""
    executor = SimulatedExecutor(machine, seed)
    engine = make_engine(machine, executor, slo)
    began_s = executor.now_s
    pending = [(number, one, began_s + one.time_s) for number, one in enumerate(arrivals)]
    pending.reverse()
    clients: dict[str, _Client] = {}
    while pending or engine.has_unfinished_requests:
        if not engine.has_unfinished_requests:
            executor.now_s = max(executor.now_s, pending[-1][2])
        while pending and pending[-1][2] <= executor.now_s:
            number, one, due_s = pending.pop()
            name = str(number)
            clients[name] = _Client(one, due_s)
            executor.num_tokens[name] = one.num_output_tokens
            engine.add_request(
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=[OTHER + number % (VOCAB_SIZE - OTHER)] * one.num_prompt_tokens,
                    sampling_params=SamplingParams(max_tokens=MAX_TOKENS),
                    arrival_time_s=due_s,
                )
            )
        for output in engine.step():
            clients[output.request_id].see(output, executor.now_s)
    return [clients[str(number)].record() for number in range(len(arrivals))]


class _Client:
    def __init__(self, arrival: Arrival, due_s: float) -> None:
        self._arrival, self._due_s = arrival, due_s
        self._times_s: list[float] = []
        self._error: str | None = None
        self._end_s = due_s

    def see(self, output: RequestOutput, now_s: float) -> None:
        self._times_s += [now_s] * len(output.new_token_ids)
        self._end_s = now_s
        if output.finish_reason == "shed":
            self._error = "status 429"

    def record(self) -> RequestRecord:
        return RequestRecord(
            scheduled_s=self._due_s,
            sent_s=self._due_s,
            token_times_s=tuple(self._times_s),
            end_s=self._end_s,
            num_prompt_tokens=self._arrival.num_prompt_tokens,
            num_output_tokens=len(self._times_s),
            error=self._error,
        )


def make_engine(machine: Machine, executor: SimulatedExecutor, slo: Slo | None) -> Engine:
    layout, num_blocks = one_group(16), machine.capacity_tokens // 16
    config = EngineConfig(model="simulated", slo=slo)
    most = StepPolicy(max_num_seqs=64, max_num_batched_tokens=512)
    plan = KVCachePlan(layout, num_blocks, 16_384)
    clock = lambda: executor.now_s  # noqa: E731
    policy = None if slo is None else slo_policy_of(slo, most, run_trial(executor, plan, VOCAB_SIZE, most, clock))
    info = EngineInfo(
        model="simulated", vocab_size=VOCAB_SIZE, max_model_len=plan.max_model_len, eos_token_ids=[EOS],
        num_blocks=num_blocks, block_tokens=16, kv_cache_bytes=0, weight_bytes=0, device="none", fingerprint={},
    )  # fmt: skip
    kv = KVCacheManager(layout, num_blocks, enable_prefix_caching=False)
    scheduler = Scheduler(kv, most, {EOS}, plan.max_model_len)
    pacer = None if policy is None else Pacer(policy.model, most, clock, slo=policy)
    return Engine(scheduler, executor, info, config, pacer=pacer, clock=clock)
