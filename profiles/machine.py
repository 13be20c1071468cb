"""What this machine is: cores, memory and GPUs that a process may use. No torch; nothing is remembered."""

import contextlib
import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class GPU:
    """One GPU as the NVIDIA driver describes it."""

    name: str
    memory_bytes: int  # what programs can use: the driver's own reserve is left out
    free_bytes: int


def usable_cores() -> int:
    """Logical cores that this process may run on at once: its affinity, and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if not quota:
        quota, period = _cgroup("cpu.cfs_quota_us"), _cgroup("cpu.cfs_period_us")
    return max(1, min(cores, int(quota) // int(period))) if quota.isdigit() and period else cores


def total_memory_bytes() -> int:
    """RAM that this process may use: the machine's, or its cgroup's limit if that is less."""
    total = _meminfo().get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _cgroup_limit() or total)


def available_memory_bytes() -> int:
    """RAM that this process may still take: the machine's MemAvailable, or what its cgroup's limit leaves if less."""
    available = _meminfo().get("MemAvailable") or total_memory_bytes()
    limit = _cgroup_limit()
    if limit is None:
        return available
    # The page cache counts as used by the cgroup, and is given up on demand.
    stat = dict(line.split() for line in _cgroup("memory.stat").splitlines())
    cache = int(stat.get("total_inactive_file") or stat.get("inactive_file", 0))
    used = int(_cgroup("memory.current") or _cgroup("memory.usage_in_bytes") or 0) - cache
    return min(available, max(0, limit - used))


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in _read(Path("/proc/meminfo")).splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _cgroup_limit() -> int | None:
    limit = _cgroup("memory.max") or _cgroup("memory.limit_in_bytes")
    return int(limit) if limit.isdigit() else None


def _cgroup(name: str) -> str:
    """A file of this process's cgroup, of version 2 or 1; "" where there is none.

    In a container the own path may not be visible: the root is then the container's own.
    """
    controller = name.partition(".")[0]
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        root = _CGROUP if not controllers else _CGROUP / controllers
        if not controllers or controller in controllers.split(","):
            for folder in (root / path.lstrip("/"), root):
                if content := _read(folder / name):
                    return content
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpu_name() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction sets in Linux's spelling ("avx512_vnni", "amx_bf16"); empty where the system does not list them."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def may_have_gpu() -> bool:
    """Whether the driver of a GPU that torch computes on is here, NVIDIA's or AMD's: told without importing torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_v2_t, whose `used` leaves out what the driver reserves."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpus() -> list[GPU]:
    """The NVIDIA GPUs of this machine, asked of the driver (NVML); empty where there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = []
        for index in range(count.value):
            # AttributeError: a driver too old for this question. Such a GPU is too old for torch's builds too.
            with contextlib.suppress(OSError, AttributeError):
                found.append(_gpu(nvml, index))
        return found
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> GPU:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    memory = _NvmlMemory(version=ctypes.sizeof(_NvmlMemory) | 2 << 24)
    for status in (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)),
        nvml.nvmlDeviceGetName(handle, name, len(name)),
        nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)),
    ):
        if status:
            raise OSError(f"NVML answers {status} for GPU {index}")
    return GPU(name.value.decode(), memory.total - memory.reserved, memory.free)
