"""Finished layers on disk beside OUT until the whole is there: the same command goes on from what a kill left."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmq.profiles.errors import FailedError, InputError
from llmq.quantize.fingerprint import Fingerprint, differences
from llmq.quantize.layer_result import LayerResult, flush, save_result
from llmq.quantize.preflight import work_path

_FINGERPRINT = "fingerprint.json"


class WorkFolder:
    """The folder OUT.work: a file for each finished decoder layer, and the fingerprint they were made under."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def spill(self) -> Path:
        """Where activations go that memory has no room for."""
        return self.path / "activations"

    def file(self, index: int) -> Path:
        return self.path / f"layer-{index:05d}.safetensors"

    def has(self, index: int) -> bool:
        return self.file(index).is_file()

    def files(self) -> list[Path]:
        return sorted(self.path.glob("layer-*.safetensors"))

    def save(self, index: int, result: LayerResult) -> None:
        save_result(result, self.file(index))

    def clear(self) -> None:
        """Drop every finished layer."""
        for path in self.files():
            path.unlink()


@contextmanager
def work_folder(out: Path, fingerprint: Fingerprint, *, restart: bool = False) -> Iterator[WorkFolder]:
    """The work folder of OUT, held by this process alone; removed at the end, but kept by an error if layers are done.

    Raises InputError where another process holds it, or where its layers were made under another fingerprint, saying
    what changed; `restart` drops them instead.
    """
    path = work_path(out)
    path.mkdir(parents=True, exist_ok=True)
    work = WorkFolder(path)
    with open(path / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another llmq quantize is writing {out}: it holds {path}") from None
        if restart:
            work.clear()
        _adopt(work, out, fingerprint)
        try:
            yield work
        except BaseException as error:
            work.spill.unlink(missing_ok=True)
            finished = len(work.files())
            if not finished:
                shutil.rmtree(path, ignore_errors=True)
            # safetensors wraps the system's error and keeps its words only.
            if isinstance(error, Exception) and os.strerror(errno.ENOSPC) in str(error):
                kept = f"; {finished} finished layers are kept, the same command goes on" if finished else ""
                raise FailedError(f"{path.parent} is full{kept}") from None
            raise
        shutil.rmtree(path, ignore_errors=True)


def _adopt(work: WorkFolder, out: Path, fingerprint: Fingerprint) -> None:
    """Go on from what is there if it was made under this fingerprint; raise if it was not."""
    stored = work.path / _FINGERPRINT
    old = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else None
    finished = work.files()
    if finished and old != fingerprint:
        changed = differences(old or {}, fingerprint)
        raise InputError(
            f"{work.path} holds {len(finished)} finished layers of {out}, made from something else:\n"
            + "\n".join(f"  {line}" for line in changed[:8])
            + (f"\n  and {len(changed) - 8} more" if len(changed) > 8 else "")
            + "\nWith what it was then the same command goes on; --restart drops these layers and begins again"
        )
    if not finished:
        partial = stored.with_suffix(".partial")
        partial.write_text(json.dumps(fingerprint, indent=1), encoding="utf-8")
        flush(partial)
        partial.replace(stored)
