"""A rank's place among an engine's ranks, and what connects it to the others."""

from dataclasses import dataclass
from pathlib import Path

import torch

from llmq.runtime.config import EngineConfig
from llmq.runtime.parallel.collectives import ProcessGroup
from llmq.runtime.parallel.stage_link import PeerLink


@dataclass(frozen=True)
class Rank:
    """`number` of tp × pp ranks: those of a stage have numbers that follow each other, the last stage has the first
    ones. So rank 0, whose process drives the others, is of the stage that samples: its tokens need not be sent back.

    collectives: with the ranks of its stage; link: with its peers in other stages. None: there are no others.
    """

    number: int
    collectives: ProcessGroup | None
    link: PeerLink | None

    @classmethod
    def of(cls, config: EngineConfig, number: int) -> "Rank":
        stages, ranks = config.pipeline_parallel, config.tensor_parallel
        from_the_end, place = divmod(number, ranks)
        collectives = ProcessGroup(place, ranks, in_order=config.batch_invariant) if ranks > 1 else None
        return cls(number, collectives, PeerLink(stages - 1 - from_the_end, stages) if stages > 1 else None)

    def connect(self, meeting_point: Path, device: torch.device) -> None:
        """Wait for all ranks. `meeting_point`: a path beside which only they can put files, and none are yet."""
        stage, place = (0 if self.link is None else self.link.stage), 0
        if self.collectives is not None:
            place = self.collectives.rank
            self.collectives.connect(meeting_point.with_name(f"{meeting_point.name}-of-stage-{stage}"), device)
        if self.link is not None:
            self.link.connect(meeting_point.with_name(f"{meeting_point.name}-of-place-{place}"), device)

    def close(self) -> None:
        for one in (self.collectives, self.link):
            if one is not None:
                one.close()
