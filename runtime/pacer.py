"""Pacer: the clock beside an engine. It times steps, has policies set each next one, and sheds who would be late."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmq.profiles.step_cost import StepCostModel
from llmq.runtime.policy import SloPolicy, StepPolicy, step_shape
from llmq.runtime.queue_forecast import Late, QueueForecast
from llmq.runtime.request import RequestOutput
from llmq.runtime.scheduler_output import SchedulerOutput
from llmq.runtime.speculative.policy import DraftPolicy

if TYPE_CHECKING:
    from llmq.runtime.scheduler import Scheduler


class Pacer:
    """Told when a step begins and ends. A step's time runs from the end of the one before it where there was work in
    between: what a token waits for is all of that."""

    def __init__(
        self,
        model: StepCostModel,
        most: StepPolicy,
        clock: Callable[[], float],
        *,
        slo: SloPolicy | None = None,
        drafts: DraftPolicy | None = None,
    ) -> None:
        """`model` is told what steps take. `most`: the policy without any other. `clock`: that of requests'
        `arrival_time_s`."""
        self.slo = slo
        self.model, self.most, self._clock, self._drafts = model, most, clock, drafts
        self._forecast = None if slo is None or slo.ttft_s is None else QueueForecast(slo, slo.ttft_s)
        self._began_s = 0.0
        self._ended_s: float | None = None  # the last step, where work was left

    def begin_step(self, scheduler: "Scheduler") -> list[RequestOutput]:
        """Set the scheduler's policy, after ending those that wait and would have their first token too late."""
        now_s = self._clock()
        self._began_s, self._ended_s = now_s if self._ended_s is None else self._ended_s, None
        outputs: list[RequestOutput] = []
        for late in () if self._forecast is None else self._forecast.late(scheduler, now_s):
            scheduler.abort(late.request.request_id)
            outputs += [self._shed(name, late) for name in late.request.names]
        policy = self.most if self.slo is None else self.slo.next_step(scheduler)
        if self._drafts is not None:
            policy = self._drafts.next_step(policy, scheduler)
        scheduler.policy = policy
        return outputs

    def end_step(self, plan: SchedulerOutput, draft_s: float = 0.0, *, goes_on: bool) -> None:
        """`draft_s`: what guessing for the next step took, which belongs to no term of this one."""
        now_s = self._clock()
        step_s = now_s - self._began_s - draft_s
        self.model.observe(step_shape(plan), step_s)
        if self._drafts is not None:
            self._drafts.observe(step_s, draft_s)
        self._ended_s = now_s if goes_on else None

    def rest(self) -> None:
        """All work was taken back: the time until there is some again belongs to no step."""
        self._ended_s = None

    def _shed(self, name: str, late: Late) -> RequestOutput:
        why = "too many requests are before it"
        if late.prompt_s > self.slo.ttft_s:
            why = f"its {late.request.num_prompt_tokens} prompt tokens take {late.prompt_s:.1f} s beside those that run"
        reason = (
            f"the first token would come after about {late.ttft_s:.1f} s, and this server promises "
            f"{self.slo.ttft_s:g} s: {why}"
        )
        return RequestOutput(request_id=name, finish_reason="shed", error=reason, retry_after_s=late.retry_after_s)
