"""What a rank hands to its peer in the next stage, and takes from that of the stage before."""

import weakref
from collections import Counter, deque
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llmq.runtime.parallel.collectives import new_group, wait_for


class StageLink(Protocol):
    stage: int
    num_stages: int

    def receive(self, into: Tensor) -> Tensor:
        """What the peer in the stage before sent next: `into`, filled, which has its shape and dtype."""
        ...

    def send(self, hidden: Tensor) -> None:
        """To the peer in the next stage, without waiting until it has it."""
        ...


class PeerLink:
    """Peers are processes: the ranks of one place in their stages, one of each. Every rank of a stage has the same
    hidden states, so each sends them to its own peer, and none has to share them out."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage, self.num_stages = stage, num_stages
        self.counts: Counter[str] = Counter()
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # tensors must live until they are taken
        self._groups: list[dist.ProcessGroup] = []  # one, once connected
        self.close = weakref.finalize(self, _close, self._groups, self._sent)

    def connect(self, meeting_point: Path, device: torch.device) -> None:
        """Wait for the peers of all stages. `meeting_point`: see `ProcessGroup.connect`."""
        self._groups.append(new_group(meeting_point, self.stage, self.num_stages, device))

    def receive(self, into: Tensor) -> Tensor:
        self.counts["receive"] += 1
        wait_for(self._groups[0].recv([into], self.stage - 1, 0))
        return into

    def send(self, hidden: Tensor) -> None:
        self.counts["send"] += 1
        # The next stage takes steps in their order: one that it has not taken yet of as many as are in flight is late.
        while len(self._sent) >= self.num_stages:
            wait_for(self._sent[0][0])
            self._sent.popleft()
        hidden = hidden.contiguous()
        self._sent.append((self._groups[0].send([hidden], self.stage + 1, 0), hidden))


def _close(groups: list[dist.ProcessGroup], sent: deque[tuple[dist.Work, Tensor]]) -> None:
    groups.clear()
    sent.clear()
