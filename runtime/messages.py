"""What the HTTP process and the engine's process say to each other: tagged structs in MessagePack over zmq."""

import msgspec

from llmq.runtime.request import EngineInfo, EngineRequest, EngineStats, RequestOutput


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End now. Whoever drains waits for the outputs first."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    stats: EngineStats


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """After every step, with or without outputs: that it comes is the sign that the engine moves forward."""

    outputs: list[RequestOutput]
    stats: EngineStats


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent once a HEARTBEAT_S while there is nothing to do."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that could not start (`exit_code` 2: the user's input) or go on."""

    reason: str
    exit_code: int


ToEngine = AddRequests | Abort | Shutdown
FromEngine = Ready | Outputs | Heartbeat | Failed

HEARTBEAT_S = 1.0
