"""A kernel's launch as data: it runs, or is compiled for a GPU that is not there, from the same arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

Argument = torch.Tensor | int | float | None


@dataclass(frozen=True)
class Target:
    """What a launch is planned for."""

    backend: str  # "cuda" or "hip"
    arch: int | str  # 80 for sm_80; "gfx942"
    num_processors: int  # streaming multiprocessors, or compute units

    @property
    def has_fp8_products(self) -> bool:
        """Tensor cores that multiply e4m3."""
        return self.backend == "cuda" and self.arch >= 89

    @property
    def is_hopper(self) -> bool:
        return self.backend == "cuda" and self.arch == 90

    @property
    def has_large_tiles(self) -> bool:
        """Data-center parts from Hopper on: products of warpgroups, and 227 KiB of shared memory."""
        return self.backend == "cuda" and 90 <= self.arch < 120

    @classmethod
    def of(cls, device: torch.device) -> "Target":
        return _target(device.type, device.index)


@lru_cache
def _target(device_type: str, index: int | None) -> Target:
    if device_type != "cuda":
        return Target("cuda", 80, 4)  # the interpreter
    properties = torch.cuda.get_device_properties(index or 0)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Target("cuda", 10 * properties.major + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True)
class Launch:
    """`kernel[grid](**arguments, **constants)` by `num_warps` warps a program, loops pipelined over `num_stages`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
