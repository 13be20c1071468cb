"""Executors: where a plan is run. `submit` does not wait for its result, so that a deeper queue can overlap steps."""

from typing import Protocol

from llmq.runtime.model_runner import ModelRunner
from llmq.runtime.scheduler_output import SchedulerOutput, StepResult


class PendingStep(Protocol):
    """As a `concurrent.futures.Future`."""

    def result(self) -> StepResult: ...


class Executor(Protocol):
    runner: ModelRunner  # in this process: the first rank's, where there are several
    depth: int  # plans that may be in flight: so many are submitted before the first one's result is asked for

    def submit(self, plan: SchedulerOutput) -> PendingStep: ...
    def check(self) -> None:
        """Raises the reason why no plan can be run any more, if there is one: what ended may have ended at rest."""
        ...

    def close(self) -> None:
        """End what was started for it."""
        ...


class InProcessExecutor:
    """Launches a plan at once, in the caller's thread: what a device computes is waited for with its result."""

    def __init__(self, runner: ModelRunner, depth: int = 1) -> None:
        """depth 2: the next step is scheduled and launched while the device computes one."""
        self.runner, self.depth = runner, depth

    def submit(self, plan: SchedulerOutput) -> PendingStep:
        return self.runner.launch(plan)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass
