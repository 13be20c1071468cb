"""The answers of an evaluation's requests on disk as they come: a run that was killed goes on where it was.

A JSONL file. The first line says of what the answers are; each further one is {"key": ..., "answer": ...}. A line that
a kill left unfinished is cut off when the file is opened again.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from llmq.profiles.errors import InputError

try:
    import fcntl
except ImportError:  # Windows: two runs at once on one file are then not noticed
    fcntl = None

# Every line reaches the kernel at once, which a kill does not undo; the disk at most this much later.
_SYNC_INTERVAL_S = 2.0

Identity = Mapping[str, Any]


def request_key(*parts: Any) -> str:
    """Of what decides an answer: token ids, sampling options."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


class AnswerLog:
    """Answers by key. Opened with `AnswerLog.open`; a context manager that closes the file."""

    def __init__(self, path: Path | None = None) -> None:
        """Without a path: nothing is known and nothing kept."""
        self.path = path
        self.num_reused = 0
        self._answers: dict[str, Any] = {}
        self._file = None
        self._synced_s = 0.0

    @classmethod
    def open(cls, path: Path, identity: Identity) -> "AnswerLog":
        """Go on with the answers in `path`, or begin it. Raises InputError where they are of something else, saying
        what differs, or where another process writes there."""
        log = cls(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        log._file = open(path, "a+b")  # noqa: SIM115 - closed by close()
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(log._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise InputError(f"another llmq eval is writing {path}") from None
            log._read(json.loads(json.dumps(identity, default=str)))
        except BaseException:
            log._file.close()
            raise
        return log

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, key: str) -> Any | None:
        answer = self._answers.get(key)
        self.num_reused += answer is not None
        return answer

    def add(self, key: str, answer: Any) -> None:
        if self._file is None:
            return
        self._answers[key] = answer
        self._write({"key": key, "answer": answer})

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Close it and take it away: what it was for is done."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced_s > _SYNC_INTERVAL_S:
            os.fsync(self._file.fileno())
            self._synced_s = time.monotonic()

    def _read(self, identity: dict[str, Any]) -> None:
        self._file.seek(0)
        whole = 0
        stored = None
        for number, line in enumerate(self._file):
            try:
                content = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                content = None
            if content is None:
                break
            if number == 0:
                stored = content.get("identity")
            else:
                self._answers[content["key"]] = content["answer"]
            whole += len(line)
        self._file.truncate(whole)
        if stored is None:
            self._file.truncate(0)
            self._answers.clear()
            self._write({"identity": identity})
        elif stored != identity and self._answers:
            raise InputError(
                f"{self.path} holds {len(self._answers)} answers of another run:\n"
                + "\n".join(f"  {line}" for line in _differences(stored, identity)[:8])
                + "\nWith what it was then the same command goes on; another -o, or removing that file, begins anew"
            )
        elif stored != identity:
            self._file.truncate(0)
            self._write({"identity": identity})


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys((*old, *new))
        return [
            line
            for key in keys
            for line in _differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
        ]
    return [] if old == new else [f"{where} was {_short(old)}, is {_short(new)}"]


def _short(value: Any, most: int = 60) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"
