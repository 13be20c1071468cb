"""Ranks as threads of one process: every collective by its definition, and counted."""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Meeting:
    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self.parts: list[Any] = [None] * num_ranks


class ThreadRank:
    """A rank's collectives."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.num_ranks = meeting, rank, meeting.num_ranks
        self.counts: Counter[str] = Counter()
        self.how = "threads"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["all_reduce"] += 1
        first, *others = self._exchange(x)
        total = first.clone()
        for part in others:
            total += part
        return total

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        self.counts["gather"] += 1
        parts = self._exchange(x)
        return parts if self.rank == 0 else None

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.parts[self.rank] = x.clone()
        self._meeting.barrier.wait()
        parts = list(self._meeting.parts)
        self._meeting.barrier.wait()
        return parts


def on_ranks(num_ranks: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `work` returns on each rank. Raises what one of them raises."""
    meeting = Meeting(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(ThreadRank(meeting, rank))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class QueueLink:
    """A stage's link to the stages before and behind it, in one process: what was sent waits until it is received."""

    def __init__(self, stage: int, queues: Sequence[queue.SimpleQueue]) -> None:
        self.stage, self.num_stages = stage, len(queues)
        self._queues = queues  # by the stage that receives
        self.counts: Counter[str] = Counter()

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        self.counts["receive"] += 1
        hidden = self._queues[self.stage].get(timeout=60)
        assert (hidden.shape, hidden.dtype) == (into.shape, into.dtype)
        return into.copy_(hidden)

    def send(self, hidden: torch.Tensor) -> None:
        self.counts["send"] += 1
        self._queues[self.stage + 1].put(hidden.clone())


def links(num_stages: int) -> list[QueueLink]:
    queues = [queue.SimpleQueue() for _ in range(num_stages)]
    return [QueueLink(stage, queues) for stage in range(num_stages)]
