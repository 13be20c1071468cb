"""What the first rank's process and the others' say to each other: tagged structs in MessagePack over a socket pair."""

import msgspec

from llmq.runtime.config import EngineConfig
from llmq.runtime.scheduler_output import SchedulerOutput


class Start(msgspec.Struct, frozen=True, tag=True):
    """Read the weights of rank `rank`."""

    config: EngineConfig
    rank: int


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Meet the other ranks and allocate KV blocks."""

    meeting_point: str
    num_blocks: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """The same plan as every rank's, and what was sampled in the step before, which only the first rank knows."""

    plan: SchedulerOutput
    sampled: dict[str, list[int]]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    weight_bytes: int
    spare_bytes: int  # see `Worker.spare_bytes`


class Allocated(msgspec.Struct, frozen=True, tag=True):
    """Ready for steps."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last words of a rank; `exit_code` 2: the user's input."""

    reason: str
    exit_code: int


class LostPeer(msgspec.Struct, frozen=True, tag=True):
    """The last words of a rank that cannot go on since another is gone: not the reason."""

    reason: str


ToRank = Start | Allocate | Step | Stop
FromRank = Loaded | Allocated | Failed | LostPeer
