"""The memory that `llmq kv-budget` is asked about, by its flags."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.profiles.errors import InputError
from llmq.profiles.units import parse_bytes

if TYPE_CHECKING:
    from llmq.profiles.budget import Memory


@dataclass(frozen=True)
class MemoryFlags:
    """As they were given; None: not. Raises InputError for those that exclude each other."""

    gpu: str | None = None
    size: str | None = None  # --memory
    kv_cache_memory: str | None = None
    share: float | None = None  # --gpu-memory-utilization
    devices: str | None = None

    def __post_init__(self) -> None:
        flags = {"--gpu": self.gpu, "--memory": self.size, "--kv-cache-memory": self.kv_cache_memory}
        named = [flag for flag, value in flags.items() if value]
        if len(named) > 1:
            raise InputError(f"{' and '.join(named)} exclude each other: give one of them")
        if self.share is not None and not self.gpu:
            raise InputError("--gpu-memory-utilization is about a GPU: give --gpu with it")
        if self.share is not None and not 0 < self.share <= 1:
            raise InputError(f"--gpu-memory-utilization {self.share}: a share above 0 and up to 1")
        if self.devices and self.gpu in (None, "auto"):
            raise InputError("--devices names GPUs: give the name of one with it, as --gpu h100")

    def memory(self, all_weight_bytes: int, ranks: int, rank_weight_bytes: int | None = None) -> "Memory | None":
        """The one memory of a rank that was named, or None. `all_weight_bytes`: of all ranks; `rank_weight_bytes`: of
        this one, None: evenly split."""
        from llmq.profiles import budget
        from llmq.runtime.memory import GPU_SHARE

        weight_bytes = -(-all_weight_bytes // ranks) if rank_weight_bytes is None else rank_weight_bytes
        if self.kv_cache_memory:
            return budget.kv_cache_memory(parse_bytes(self.kv_cache_memory))
        if self.size:
            return budget.whole_memory("memory", parse_bytes(self.size), weight_bytes)
        if self.gpu == "auto":
            return _this_machine(self.share, all_weight_bytes, ranks, weight_bytes)
        if self.gpu:
            name, num_bytes = self.whole_memory()
            return budget.gpu_memory(name, num_bytes, self.share or GPU_SHARE, weight_bytes)
        return None

    def whole_memory(self) -> tuple[str, int]:
        """(name, bytes) of what one rank has, all of it. Raises InputError where none is named, or this machine has
        no GPU."""
        from llmq.profiles import machine
        from llmq.profiles.devices import find_device

        if self.size:
            return f"memory of {self.size}", parse_bytes(self.size)
        if not self.gpu:
            raise InputError("--engine predicts the pool on a GPU: give one, as --gpu h100, or --memory 80GiB")
        if self.gpu != "auto":
            device = find_device(self.gpu, Path(self.devices) if self.devices else None)
            return device.name, device.memory_bytes
        if not (gpus := machine.gpus()):
            raise InputError("--gpu auto: this machine has no GPU; name one, as --gpu h100")
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        return smallest.name, smallest.memory_bytes


def _this_machine(share: float | None, all_weight_bytes: int, ranks: int, weight_bytes: int) -> "Memory":
    from llmq.profiles import budget, machine
    from llmq.runtime.memory import CPU_SHARE, GPU_SHARE

    if gpus := machine.gpus():
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        return budget.gpu_memory(smallest.name, smallest.memory_bytes, share or GPU_SHARE, weight_bytes)
    if share is not None:
        raise InputError("--gpu-memory-utilization: --gpu auto finds no GPU on this machine")
    name = f"free RAM (no GPU; KV gets {CPU_SHARE:.0%}{', all ranks together' if ranks > 1 else ''})"
    return budget.shared_memory(name, machine.available_memory_bytes(), CPU_SHARE, all_weight_bytes, ranks)
