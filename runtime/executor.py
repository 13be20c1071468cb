"""Executors: where a plan is run. `submit` gives a future, so that a deeper queue can overlap steps."""

from concurrent.futures import Future
from typing import Protocol

from llmq.runtime.model_runner import ModelRunner
from llmq.runtime.scheduler_output import SchedulerOutput, StepResult


class Executor(Protocol):
    runner: ModelRunner  # in this process: the first rank's, where there are several

    def submit(self, plan: SchedulerOutput) -> "Future[StepResult]": ...
    def check(self) -> None:
        """Raises the reason why no plan can be run any more, if there is one: what ended may have ended at rest."""
        ...

    def close(self) -> None:
        """End what was started for it."""
        ...


class InProcessExecutor:
    """Runs a plan at once, in the caller's thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def submit(self, plan: SchedulerOutput) -> "Future[StepResult]":
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.runner.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass
