"""llmq's own cache: folders that appear whole or not at all, made once even when two processes want the same one."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llmq.profiles.errors import FailedError
from llmq.profiles.units import format_bytes

try:
    import fcntl
except ImportError:  # Windows: two processes may then do the same work; the rename still keeps the result whole
    fcntl = None


def cache_dir() -> Path:
    """$LLMQ_CACHE, else $XDG_CACHE_HOME/llmq, else ~/.cache/llmq. Not created here."""
    if own := os.environ.get("LLMQ_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmq"


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of a folder that is about to be made; whoever else wants it waits here, then finds it done."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def try_lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed; False where another process has."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder, renamed to `target` when the block ends and removed when it raises. Call under `locked`."""
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise FailedError when the file system of `folder` has less than `needed_bytes` left."""
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise FailedError(
            f"{what} needs {format_bytes(needed_bytes)} in {folder}, and {format_bytes(free_bytes)} are free; "
            "set LLMQ_CACHE to a folder on a larger disk"
        )
