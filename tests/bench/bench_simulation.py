"""The scheduler and the KVCacheManager with no model behind them: each request generates a known number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.profiles.load.arrivals import Arrival
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
class StepCost:
    """Seconds of a step: something fixed, the weights' bytes or the tokens' arithmetic, whichever takes longer, what
    each sequence takes (a row of logits, a sample), and reading the context."""

    fixed_s: float
    weights_s: float
    token_s: float
    sequence_s: float
    context_token_s: float

    def step_s(self, plan: SchedulerOutput) -> float:
        return self.step_of(*shape(plan))

    def step_of(self, tokens: int, sequences: int, context: int) -> float:
        products_s = max(self.weights_s, self.token_s * tokens)
        return self.fixed_s + products_s + self.sequence_s * sequences + self.context_token_s * context

    @classmethod
    def fitted(cls, shapes: Sequence[tuple[int, int, int]], times_s: Sequence[float]) -> "StepCost":
        """To steps that were measured, by least squares of the relative error, none below 0.

        On a CPU products are bound by arithmetic from few tokens on: the weights' bytes are in what is fixed.
        """
        columns = np.array([[1, *shape] for shape in shapes], dtype=float) / np.array(times_s)[:, None]
        kept = list(range(columns.shape[1]))
        while True:
            found = np.linalg.lstsq(columns[:, kept], np.ones(len(times_s)), rcond=None)[0]
            if (found >= 0).all():
                break
            kept.pop(int(found.argmin()))
        values = dict.fromkeys(range(columns.shape[1]), 0.0) | dict(zip(kept, map(float, found), strict=True))
        return cls(values[0], 0.0, values[1], values[2], values[3])


def shape(plan: SchedulerOutput) -> tuple[int, int, int]:
    """(tokens, sequences, tokens of context) of a step."""
    context = sum(item.num_computed_tokens + item.num_scheduled_tokens for item in plan.scheduled)
    return plan.num_scheduled_tokens, len(plan.scheduled), context


# An 8B model in bf16 on an H100 (16.1 GB at 3.35 TB/s; 16 GFLOP a token at half of 989 TFLOP/s; 128 KiB of KV a token).
H100_8B = StepCost(fixed_s=0, weights_s=4.8e-3, token_s=32e-6, sequence_s=0, context_token_s=39e-9)


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
