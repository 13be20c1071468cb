"""What the first rank's process and the others' say to each other: tagged structs in MessagePack over a socket pair."""

import msgspec

from llmq.runtime.config import EngineConfig
from llmq.runtime.memory import MemoryProfile
from llmq.runtime.scheduler_output import DraftPass, SchedulerOutput


class Start(msgspec.Struct, frozen=True, tag=True):
    """Read the weights of rank `rank`."""

    config: EngineConfig
    rank: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Meet the other ranks."""

    meeting_point: str


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Run the largest step, as every rank does now, and measure it: `Worker.profile`."""


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate KV blocks."""

    num_blocks: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """The same plan as every rank's."""

    plan: SchedulerOutput


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """What a rank has read of the weights."""

    weight_bytes: int
    schemes: dict[str, int]  # what its linears are made of -> how many
    kernels: list[str]
    rotations: list[str]


class Profiled(msgspec.Struct, frozen=True, tag=True):
    memory: MemoryProfile


class Allocated(msgspec.Struct, frozen=True, tag=True):
    """Ready for steps."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last words of a rank; `exit_code` 2: the user's input."""

    reason: str
    exit_code: int


class LostPeer(msgspec.Struct, frozen=True, tag=True):
    """The last words of a rank that cannot go on since another is gone: not the reason."""

    reason: str


ToRank = Start | Meet | Profile | Allocate | Step | DraftPass | Stop
FromRank = Loaded | Profiled | Allocated | Failed | LostPeer
