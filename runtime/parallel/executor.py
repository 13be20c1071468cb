"""RankExecutor: a plan on every rank, the first one in this process."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from llmq.profiles.errors import FailedError
from llmq.runtime.memory import KVCachePlan, MemoryProfile
from llmq.runtime.model_runner import ModelRunner
from llmq.runtime.parallel.collectives import LostPeerError, ProcessGroup
from llmq.runtime.parallel.messages import Allocate, Allocated, Loaded, Meet, Profile, Profiled, Step
from llmq.runtime.parallel.rank_processes import REASON_S, RankProcesses
from llmq.runtime.sampling.sampler import Sampler
from llmq.runtime.scheduler_output import SchedulerOutput, StepResult
from llmq.runtime.worker import Worker


class RankThread:
    """Calls functions, one after the other, in a thread of its own, so that what stands still in a collective is not
    waited for once it is known why."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # nothing is called any more
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._pending: set[Future] = set()
        self._lock = threading.Lock()
        self._has_failed = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="rank-0").start()

    def call(self, function: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self._lock:
            if self.error is not None:
                future.set_exception(self.error)
                return future
            self._pending.add(future)
        self._calls.put((future, function))
        return future

    def fail(self, error: Exception) -> None:
        """All that is waited for has failed, and all that will be asked."""
        with self._lock:
            self.error = self.error or error
            for future in self._pending:
                future.set_exception(self.error)
            self._pending.clear()
        self._has_failed.set()

    def close(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                result = function()
            except LostPeerError as error:
                self._has_failed.wait(2 * REASON_S)  # who watches the other ranks knows why
                self.fail(error)
            except Exception as error:  # the other ranks have gone on, or wait: they are out of step
                self.fail(error)
            else:
                with self._lock:
                    if future in self._pending:
                        self._pending.remove(future)
                        future.set_result(result)
            del call, future, function


class RankExecutor:
    """The same plan for every rank. What the first samples the others learn with the next plan."""

    def __init__(
        self,
        runner: ModelRunner,
        thread: RankThread,
        processes: RankProcesses,
        collectives: ProcessGroup,
        weight_bytes: int,
    ) -> None:
        self.runner = runner
        self.weight_bytes = weight_bytes  # of all ranks
        self._thread, self._processes, self._collectives = thread, processes, collectives
        self._sampled: dict[str, list[int]] = {}
        processes.watch(thread.fail)

    @classmethod
    def start(
        cls,
        worker: Worker,
        collectives: ProcessGroup,
        plan: KVCachePlan | None,
        sampler: Sampler,
    ) -> tuple["RankExecutor", KVCachePlan, MemoryProfile | None]:
        """Start the other ranks' processes, load on all and allocate. `plan` None: by what the fullest rank has left,
        which is returned.

        Raises InputError or FailedError with the words of the rank that cannot."""
        processes, thread = RankProcesses(worker.config), RankThread()
        try:
            loading = thread.call(worker.load)
            others = processes.expect(Loaded)
            loading.result()
            processes.send(Meet(str(processes.meeting_point)))
            meeting = thread.call(partial(collectives.connect, processes.meeting_point, worker.device))
            memory = None
            if plan is None:
                memory = min(_profiles(worker, processes, thread), key=lambda profile: profile.spare_bytes)
                plan = worker.plan(memory.spare_bytes)
            processes.send(Allocate(plan.num_blocks))
            allocating = thread.call(partial(worker.make_runner, plan.num_blocks, sampler, tell=processes.send))
            processes.expect(Allocated)
            meeting.result()
            weight_bytes = worker.weight_bytes + sum(other.weight_bytes for other in others)
            return cls(allocating.result(), thread, processes, collectives, weight_bytes), plan, memory
        except BaseException:
            thread.close()
            processes.close()
            collectives.close()
            raise

    def submit(self, plan: SchedulerOutput) -> "Future[StepResult]":
        if self._thread.error is None:
            self._processes.send(Step(plan, self._sampled))
        return self._thread.call(partial(self._execute, plan))

    def check(self) -> None:
        if self._thread.error is not None:
            raise self._thread.error

    def close(self) -> None:
        self._thread.close()
        self._processes.close()
        self._collectives.close()

    def _execute(self, plan: SchedulerOutput) -> StepResult:
        made = self.runner.execute(plan)
        self._sampled = {name: result.token_ids for name, result in made.results.items() if result.token_ids}
        return made


def _profiles(worker: Worker, processes: RankProcesses, thread: RankThread) -> list[MemoryProfile]:
    """Of all ranks. Raises what one of them raises; the others then stand in a collective, from which none returns."""
    processes.send(Profile())
    profiling = thread.call(worker.profile)
    profiling.add_done_callback(lambda own: processes.close() if own.exception() is not None else None)
    try:
        others = [profiled.memory for profiled in processes.expect(Profiled)]
    except FailedError:
        if profiling.done():
            profiling.result()
        raise
    return [profiling.result(), *others]
