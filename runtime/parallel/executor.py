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
from llmq.runtime.parallel.collectives import LostPeerError
from llmq.runtime.parallel.messages import Allocate, Allocated, Loaded, Meet, Profile, Profiled, Step
from llmq.runtime.parallel.rank import Rank
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
            if self.error is not None:
                continue  # whoever waits for it has been told
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
    """The same plan for every rank. What the first samples the others learn with the next plan of the same request.

    Several plans may be in flight: every rank takes them in their order, so that the stages of a pipeline compute
    different ones at the same time. A step is not cut into micro-batches that a worker pipelines: of such a step each
    stage would wait for the first and the last of them, and where decoding reads the weights for each, it would take
    longer than uncut. With steps of a share of the requests each (`Scheduler.depth`), of which a request is in one, a
    stage waits for none but its own requests' tokens, and the runner and its plan are those of one rank.
    """

    def __init__(
        self, runner: ModelRunner, thread: RankThread, processes: RankProcesses, rank: Rank, loaded: list[Loaded]
    ) -> None:
        self.runner = runner
        self.depth = 1 if rank.link is None else rank.link.num_stages
        self.loaded = loaded  # by each rank, in order
        self._thread, self._processes, self._rank = thread, processes, rank
        processes.watch(thread.fail)

    @classmethod
    def start(
        cls,
        worker: Worker,
        rank: Rank,
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
            meeting = thread.call(partial(rank.connect, processes.meeting_point, worker.device))
            memory = None
            if plan is None:
                plan, memory = worker.plan_by(_profiles(worker, processes, thread))
            processes.send(Allocate(plan.num_blocks))
            allocating = thread.call(partial(worker.make_runner, plan.num_blocks, sampler, tell=processes.send))
            processes.expect(Allocated)
            meeting.result()
            return cls(allocating.result(), thread, processes, rank, [worker.loaded, *others]), plan, memory
        except BaseException:
            thread.close()
            processes.close()
            rank.close()
            raise

    def submit(self, plan: SchedulerOutput) -> "Future[StepResult]":
        if self._thread.error is None:
            self._processes.send(Step(plan))
        return self._thread.call(partial(self.runner.execute, plan))

    def check(self) -> None:
        if self._thread.error is not None:
            raise self._thread.error

    def close(self) -> None:
        self._thread.close()
        self._processes.close()
        self._rank.close()


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
