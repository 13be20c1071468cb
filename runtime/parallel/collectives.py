"""What ranks do together: sums and gathers, the same calls in the same order on each."""

import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llmq.profiles.errors import FailedError
from llmq.runtime.parallel.symmetric import SymmetricAllReduce, SymmetricMemory, start_symmetric, why_no_peers

# A rank that is gone is noticed by its connection; this is only longer than any step.
TIMEOUT = timedelta(hours=1)


class LostPeerError(FailedError):
    """A collective that cannot end, since another rank has."""


class Collectives(Protocol):
    rank: int
    num_ranks: int
    how: str  # sums are made, for people

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits on each; may be x itself, changed in place."""
        ...

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's x, which are alike in shape, on rank 0; None on others."""
        ...


class ProcessGroup:
    """Ranks that are processes of this machine: between CUDA devices NCCL, and symmetric memory for small rows; else
    gloo over the loopback interface."""

    def __init__(self, rank: int, num_ranks: int, *, in_order: bool = False) -> None:
        """in_order: sum in the order of ranks, in float32, so that no number depends on where it lies in the tensor."""
        self.rank, self.num_ranks = rank, num_ranks
        self.counts: Counter[str] = Counter()
        self.how = ""  # sums are made, for people; once connected
        self._in_order = in_order
        self._symmetric: SymmetricAllReduce | None = None
        self._groups: list[dist.ProcessGroup] = []  # one, once connected
        # At the latest when Python ends, and before it does: a group that is still there then may abort the process.
        self.close = weakref.finalize(self, self._groups.clear)

    def connect(self, meeting_point: Path, device: torch.device) -> None:
        """Wait for all ranks. `meeting_point`: a file that only they can reach, and that is not there yet."""
        self._groups.append(new_group(meeting_point, self.rank, self.num_ranks, device))
        if device.type != "cuda":
            self.how = "gloo"
            return
        self.how = "NCCL"
        if not self._in_order:
            store = dist.FileStore(f"{meeting_point} memory", self.num_ranks)
            self._map_peers(str(meeting_point), store, device)

    def _map_peers(
        self, name: str, store: dist.Store, device: torch.device, memory: SymmetricMemory | None = None
    ) -> None:
        """Sum small rows through memory that all ranks map, where they can; say what was picked and why."""

        def agree(says_so: bool) -> bool:
            flag, options = torch.tensor([int(says_so)], dtype=torch.int32, device=device), dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MIN
            wait_for(self._groups[0].allreduce([flag], options))
            return bool(flag.item())

        why_not = None if device.type != "cuda" else why_no_peers(device, self.rank, self.num_ranks)
        self._symmetric, why = start_symmetric(
            name, self.rank, self.num_ranks, store, device, agree, memory, why_not=why_not
        )
        self.how = f"NCCL ({why})" if self._symmetric is None else f"{why}, else NCCL"

    def all_reduce(self, x: Tensor) -> Tensor:
        self.counts["all_reduce"] += 1
        x = x.contiguous()
        if self._symmetric is not None and self._symmetric.takes(x):
            return self._symmetric(x)
        if not self._in_order:
            wait_for(self._groups[0].allreduce([x]))
            return x
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        wait_for(self._groups[0].allgather([parts], [x]))
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        self.counts["gather"] += 1
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)] if self.rank == 0 else None
        wait_for(self._groups[0].gather([parts] if parts else [], [x.contiguous()], options))
        return parts


def new_group(meeting_point: Path, rank: int, num_ranks: int, device: torch.device) -> dist.ProcessGroup:
    """Rank `rank` of processes that meet at a file, once all are there."""
    store = dist.FileStore(str(meeting_point), num_ranks)
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, num_ranks, dist.ProcessGroupNCCL.Options())
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, num_ranks, options)


def wait_for(work: dist.Work) -> None:
    """Until it is done. Raises LostPeerError where it cannot end."""
    try:
        work.wait()
    except RuntimeError as error:
        raise LostPeerError(f"a collective of the ranks failed: {_reason(str(error))}") from None


def _reason(said: str) -> str:
    """Of `[file:line] Connection closed by peer [address]. Advice.` the middle."""
    first = said.splitlines()[0] if said else "no reason given"
    return (first.partition("] ")[2] if first.startswith("[") else first).partition(". ")[0]
