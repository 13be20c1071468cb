import ctypes

import pytest

from llmq.profiles import machine

GiB = 2**30


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A system whose files are these: files["/proc/meminfo"] = "…"."""
    content: dict[str, str] = {}
    monkeypatch.setattr(machine, "_read", lambda path: content.get(str(path), ""))
    content["/proc/meminfo"] = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB"
    return content


def test_memory_of_a_plain_machine(files):
    assert machine.total_memory_bytes() == 16 * GiB
    assert machine.available_memory_bytes() == 8 * GiB


def test_a_container_s_limit_counts_and_its_page_cache_does_not(files):
    files["/proc/self/cgroup"] = "0::/"
    files["/sys/fs/cgroup/memory.max"] = str(4 * GiB)
    files["/sys/fs/cgroup/memory.current"] = str(3 * GiB)
    files["/sys/fs/cgroup/memory.stat"] = f"anon 5\ninactive_file {2 * GiB}"
    assert machine.total_memory_bytes() == 4 * GiB
    assert machine.available_memory_bytes() == 3 * GiB


def test_version_1_of_cgroups(files):
    files["/proc/self/cgroup"] = "4:memory:/job/7\n2:cpu,cpuacct:/"
    files["/sys/fs/cgroup/memory/job/7/memory.limit_in_bytes"] = str(2 * GiB)
    files["/sys/fs/cgroup/memory/job/7/memory.usage_in_bytes"] = str(GiB)
    assert machine.available_memory_bytes() == GiB


def test_no_limit_is_no_limit(files):
    files["/proc/self/cgroup"] = "0::/user.slice"
    files["/sys/fs/cgroup/user.slice/memory.max"] = "max"
    assert machine.available_memory_bytes() == 8 * GiB


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_cores_by_quota(files, monkeypatch, quota, cores):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    files["/proc/self/cgroup"] = "0::/"
    files["/sys/fs/cgroup/cpu.max"] = quota
    assert machine.usable_cores() == (cores or 64)


def test_this_machine_has_something():
    assert machine.usable_cores() >= 1
    assert 0 < machine.available_memory_bytes() <= machine.total_memory_bytes()
    assert machine.cpu_name()


class FakeNvml:
    """The driver's library, of two GPUs of which the second does not answer for its memory."""

    def __init__(self) -> None:
        self.is_open = False

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:  # noqa: N802
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, handle, name, length) -> int:  # noqa: N802
        name.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle, memory) -> int:  # noqa: N802
        if handle.value == 2:
            return 15  # the GPU is lost
        assert memory._obj.version == ctypes.sizeof(memory._obj) | 2 << 24
        memory._obj.total, memory._obj.reserved, memory._obj.free = 141 * GiB, GiB, 100 * GiB
        return 0


def test_gpus_are_asked_of_the_driver(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: nvml)
    assert machine.gpus() == [machine.GPU("NVIDIA H200", 140 * GiB, 100 * GiB)]
    assert not nvml.is_open


def test_no_driver_no_gpu(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    assert machine.gpus() == []
