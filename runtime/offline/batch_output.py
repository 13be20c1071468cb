"""The results of a batch: appended line by line, durable in groups, and taken up again after any end."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmq.profiles.errors import FailedError, InputError

SYNC_LINES, SYNC_S = 64, 1.0
_SAMPLES, _SAMPLE_BYTES = 16, 65_536  # of each weight file


class BatchOutput:
    """Opened for one job: the same input, model and settings, or it is refused.

    What makes the job is kept beside the results, in `OUT.job`. A line is with the operating system as soon as it is
    written (so that it survives kill -9) and is synced to the disk with those around it: after `SYNC_LINES` lines, with
    the first line later than `SYNC_S`, and at the end. One process at a time.
    """

    def __init__(self, path: Path, job: dict[str, Any], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InputError where `path` holds anything but results of `job`, or another process is at it."""
        self.path = path
        self.statuses: dict[str, int] = {}  # custom_id -> status code of what is there already
        self._clock = clock
        self._unsynced, self._synced_s = 0, clock()
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self._check_job(job)
            self._read_back()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            with self._told():
                self._sync()
                self._file.close()
        except FailedError:
            if kind is None:  # else it has been told
                raise
        finally:
            with contextlib.suppress(OSError):  # a close that fails to write closes all the same
                self._file.close()

    def append(self, custom_id: str, status: int, result: dict[str, Any]) -> None:
        """Raises FailedError where the disk takes no more."""
        with self._told():
            self._file.write(json.dumps(result, ensure_ascii=False).encode(errors="replace") + b"\n")
            self._file.flush()
            self._note(custom_id, status)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FailedError(
                f"{self.path}: cannot be written any further: {error.strerror}. Whole lines stay, a last one without "
                "an end goes: with room again, the same command goes on from there"
            ) from None

    def _note(self, custom_id: str, status: int) -> None:
        self.statuses[custom_id] = status
        self._unsynced += 1
        if self._unsynced >= SYNC_LINES or self._clock() - self._synced_s >= SYNC_S:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._unsynced, self._synced_s = 0, self._clock()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self.path}: another llmq batch is writing it") from None

    def _check_job(self, job: dict[str, Any]) -> None:
        record = self.path.with_name(self.path.name + ".job")
        if not record.exists():
            if self._file.seek(0, os.SEEK_END):
                raise InputError(f"{self.path} is there and not of this command: choose another -o, or remove it")
            try:
                _write_durably(record, job)
            except OSError as error:
                raise FailedError(f"{record}: cannot be written: {error.strerror}") from None
            return
        try:
            before = json.loads(record.read_text(encoding="utf-8"))
        except ValueError:
            raise InputError(f"{record}: not readable; remove it and {self.path} to start anew") from None
        for name in sorted(job.keys() | before.keys()):
            if job.get(name) != before.get(name):
                raise InputError(
                    f"{self.path} was begun with another {name}: {before.get(name)!r}, and now it is "
                    f"{job.get(name)!r}. Go on with the same, or choose another -o"
                )

    def _read_back(self) -> None:
        """Take in what is there; a last line without an end was cut by a crash, and goes."""
        self._file.seek(0)
        whole = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break
            try:
                result = json.loads(raw)
                self.statuses[result["custom_id"]] = result["response"]["status_code"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{self.path}: byte {whole}: not a result of llmq batch") from None
            whole += len(raw)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)


def model_identity(folder: Path) -> str:
    """One word for what a model folder holds: its small files in full, samples of its weights (with names and sizes).

    Enough to notice another checkpoint or a changed one, in a moment also where weights are hundreds of GB.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".jinja", ".model", ".safetensors", ".txt"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            for offset in _sample_offsets(size):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _sample_offsets(size: int) -> list[int]:
    """Evenly spread, the first and the last bytes among them; all there are of a small file."""
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return list(range(0, size, _SAMPLE_BYTES))
    return [(size - _SAMPLE_BYTES) * number // (_SAMPLES - 1) for number in range(_SAMPLES)]


def _write_durably(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
