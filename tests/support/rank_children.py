"""Processes of ranks that this process has started."""

import os
from pathlib import Path


def children() -> list[int]:
    """Their process ids, in the order of ranks."""
    listed = [path.read_text().split() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")]
    found = sorted(int(pid) for pids in listed for pid in pids)
    return [pid for pid in found if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
