"""The scheduler and the KVCacheManager with no model behind them: each request generates a known number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.step_cost import StepCost, StepShape
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.policy import StepPolicy
from llmq.runtime.request import EngineRequest, RequestOutput
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import RequestResult, SchedulerOutput, StepResult

EOS, OTHER = 2, 3


def one_group(block_tokens: int) -> KVCacheLayout:
    """Full attention in every layer: the arithmetic of blocks is the same for any size of head."""
    spec = KVCacheSpec(1, 64, 64, KV_DTYPES["bf16"], None)
    return KVCacheLayout((KVCacheGroup(spec, (0,), block_tokens),))


@dataclass(frozen=True)
class GpuCost(StepCost):
    """Products take as long as the weights' bytes or the tokens' arithmetic, whichever is longer. `fixed_s` is beside
    them."""

    weights_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        return super().step_s(shape) + max(0.0, self.weights_s - self.token_s * shape.num_tokens)


# An 8B model in bf16 on an H100 (16.1 GB at 3.35 TB/s; 16 GFLOP a token at half of 989 TFLOP/s; 128 KiB of KV a token).
H100_8B = GpuCost(fixed_s=0, weights_s=4.8e-3, token_s=32e-6, sequence_s=0, context_token_s=39e-9, pair_s=0)


class SimulatedEngine:
    """Steps a Scheduler; a request ends with EOS after as many tokens as its arrival says, unforeseen."""

    def __init__(
        self,
        policy: StepPolicy,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        max_model_len: int = 16_384,
        max_tokens: int = 1024,
        enable_prefix_caching: bool = False,
    ) -> None:
        self.kv = KVCacheManager(one_group(block_tokens), num_blocks, enable_prefix_caching)
        self.scheduler = Scheduler(self.kv, policy, {EOS}, max_model_len)
        self._max_tokens = max_tokens
        self._left: dict[str, int] = {}

    def add(self, number: int, arrival: Arrival) -> str:
        request_id = str(number)
        self._left[request_id] = arrival.num_output_tokens
        params = SamplingParams(max_tokens=self._max_tokens)
        self.scheduler.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=[OTHER + number] * arrival.num_prompt_tokens,  # no two share a block
                sampling_params=params,
                arrival_time_s=float(number),
            )
        )
        return request_id

    def add_all(self, arrivals: Sequence[Arrival]) -> None:
        for number, arrival in enumerate(arrivals):
            self.add(number, arrival)

    def execute(self, plan: SchedulerOutput) -> StepResult:
        return StepResult(results={item.request_id: self._result(item) for item in plan.scheduled})

    def step(self) -> tuple[SchedulerOutput, list[RequestOutput]]:
        plan = self.scheduler.schedule()
        return plan, self.scheduler.update_from_output(plan, self.execute(plan))

    def _result(self, item) -> RequestResult:
        if not item.samples:
            return RequestResult()
        self._left[item.request_id] -= 1
        return RequestResult(token_ids=[EOS if self._left[item.request_id] <= 0 else OTHER])
