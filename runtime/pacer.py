"""Pacer: the clock beside an engine that keeps an SLO. It times steps, sheds who is late, and hands on the policy."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmq.runtime.policy import SloPolicy
from llmq.runtime.queue_forecast import Late, QueueForecast
from llmq.runtime.request import RequestOutput
from llmq.runtime.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from llmq.runtime.scheduler import Scheduler


class Pacer:
    """Told when a step begins and ends. A step's time runs from the end of the one before it where there was work in
    between: what a token waits for is all of that."""

    def __init__(self, policy: SloPolicy, clock: Callable[[], float]) -> None:
        """`clock`: that of requests' `arrival_time_s`."""
        self.policy = policy
        self._clock = clock
        self._forecast = None if policy.ttft_s is None else QueueForecast(policy, policy.ttft_s)
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
        scheduler.policy = self.policy.next_step(scheduler)
        return outputs

    def end_step(self, plan: SchedulerOutput, *, goes_on: bool) -> None:
        now_s = self._clock()
        self.policy.observe(plan, now_s - self._began_s)
        self._ended_s = now_s if goes_on else None

    def rest(self) -> None:
        """All work was taken back: the time until there is some again belongs to no step."""
        self._ended_s = None

    def _shed(self, name: str, late: Late) -> RequestOutput:
        why = "too many requests are before it"
        if late.prompt_s > self.policy.ttft_s:
            why = f"its {late.request.num_prompt_tokens} prompt tokens take {late.prompt_s:.1f} s beside those that run"
        reason = (
            f"the first token would come after about {late.ttft_s:.1f} s, and this server promises "
            f"{self.policy.ttft_s:g} s: {why}"
        )
        return RequestOutput(request_id=name, finish_reason="shed", error=reason, retry_after_s=late.retry_after_s)
