"""A scheduler under an SLO without a model: a step takes what a known cost says."""

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.profiles.slo import Slo
from llmq.profiles.step_cost import StepCost, StepCostModel, StepShape
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.policy import SloPolicy, StepPolicy, step_shape
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import RequestResult, SchedulerOutput, StepResult

LAYOUT = KVCacheLayout((KVCacheGroup(KVCacheSpec(1, 8, 8, KV_DTYPES["bf16"]), (0,), 16),))
COST = StepCost(fixed_s=0.010, token_s=0.001, sequence_s=0.002, context_token_s=1e-5, pair_s=1e-6)
MOST = StepPolicy(max_num_seqs=32, max_num_batched_tokens=256)


class Served:
    """A scheduler whose policy is set before each step, as the engine does it."""

    def __init__(self, slo: str, *, enable_prefix_caching: bool = False, most: StepPolicy = MOST) -> None:
        self.policy = SloPolicy(Slo.parse(slo), most, StepCostModel(COST))
        self.scheduler = Scheduler(KVCacheManager(LAYOUT, 1024, enable_prefix_caching), most, [2], 4096)

    def add(self, name: str, num_prompt_tokens: int, *, max_tokens: int = 50, arrival: float = 0.0, n: int = 1) -> None:
        self.scheduler.add_request(
            EngineRequest(
                request_id=name,
                prompt_token_ids=[5] * num_prompt_tokens,
                sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                arrival_time_s=arrival,
                forks=[(f"{name}+{number}", number) for number in range(1, n)],
            )
        )

    def slow_down(self, factor: float) -> None:
        for _ in range(40):
            shape = StepShape.decode(4, 100)
            self.policy.model.observe(shape, factor * COST.step_s(shape))

    def step(self) -> tuple[SchedulerOutput, float]:
        """(the plan, what it takes)"""
        self.scheduler.policy = self.policy.next_step(self.scheduler)
        plan = self.scheduler.schedule()
        forks = {one.request_id: one.names[1:] for one in self.scheduler.running}
        results = {
            one.request_id: RequestResult(
                token_ids=[9] * one.samples,
                forks={name: RequestResult(token_ids=[9]) for name in forks.get(one.request_id, ())},
            )
            for one in plan.scheduled
        }
        self.scheduler.update_from_output(plan, StepResult(results=results))
        return plan, COST.step_s(step_shape(plan))
