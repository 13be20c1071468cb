"""What a driver is asked for, and what it hands back. Standard library only: drivers run in foreign environments.

A driver is a script: `python drive_<peer>.py JOB.json`. It quantizes `model` into `out`/checkpoint and stops the meter;
then, unmeasured, it writes `out`/dense.safetensors: each tensor that differs from the model's, dequantized.
"""

import atexit
import json
import resource
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_SAMPLE_EVERY_S = 0.05


@dataclass(frozen=True)
class Scheme:
    """What the linears become. group_size None: one scale a row. activations: "int8" or "fp8" per token, or as is."""

    kind: str  # "int" or "float"
    bits: int
    group_size: int | None
    symmetric: bool
    activations: str | None = None


SCHEMES = {
    "w4-g64": Scheme("int", 4, 64, symmetric=False),
    "w3-g64": Scheme("int", 3, 64, symmetric=False),
    "w8a8": Scheme("int", 8, None, symmetric=True, activations="int8"),
    "fp8": Scheme("float", 8, None, symmetric=True, activations="fp8"),
}


@dataclass(frozen=True)
class Job:
    model: str  # folder of a 16-bit checkpoint
    out: str
    scheme: Scheme
    samples: list[list[int]]  # token ids to calibrate on
    calibration: dict[str, Any]  # where they come from: {"text": path, "num_samples": …, "seq_len": …}
    dtype: str = "bfloat16"  # that layers multiply in, for drivers whose peer can be told
    options: dict[str, Any] = field(default_factory=dict)  # the driver's own

    @property
    def checkpoint(self) -> Path:
        return Path(self.out) / "checkpoint"

    @property
    def dense(self) -> Path:
        return Path(self.out) / "dense.safetensors"

    def save(self) -> Path:
        Path(self.out).mkdir(parents=True, exist_ok=True)
        path = Path(self.out) / "job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def from_command_line(cls) -> "Job":
        fields = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        return cls(**{**fields, "scheme": Scheme(**fields["scheme"])})


class Meter:
    """Time and memory from here, after the imports, to `stop`, or to the process's end, where that comes first.

    Peaks are resident sets: `peak_rss_bytes` is the kernel's own high-water mark, set back where this starts, and
    counts pages of mapped files; the anonymous peak, sampled every 50 ms, does not.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        _reset_high_water_mark()
        self._imports_bytes = _status_bytes("VmRSS")
        self._imports_anonymous_bytes = self._peak_anonymous = _status_bytes("RssAnon")
        self._cpu_s, self._started_s = _cpu_seconds(), time.perf_counter()
        self._stopped = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        # A time limit ends a driver by SIGTERM. A peer's own handler may take this one's place: it will exit too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        atexit.register(self.stop, is_whole=False)

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_EVERY_S):
            self._peak_anonymous = max(self._peak_anonymous, _status_bytes("RssAnon"))

    def stop(self, *, is_whole: bool = True) -> None:
        atexit.unregister(self.stop)
        wall_s, cpu_s = time.perf_counter() - self._started_s, _cpu_seconds() - self._cpu_s
        peak = _status_bytes("VmHWM")
        self._stopped.set()
        self._sampler.join()
        measured = {
            "is_whole": is_whole,
            "wall_s": round(wall_s, 2),
            "cpu_s": round(cpu_s, 2),
            "imports_rss_bytes": self._imports_bytes,
            "peak_rss_bytes": peak,
            "above_imports_bytes": peak - self._imports_bytes,
            "anonymous_above_imports_bytes": self._peak_anonymous - self._imports_anonymous_bytes,
        }
        (Path(self._job.out) / "measured.json").write_text(json.dumps(measured), encoding="utf-8")


def _reset_high_water_mark() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux")


def _cpu_seconds() -> float:
    """Of all threads, and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
