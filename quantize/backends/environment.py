"""Virtual environments of their own for libraries that live with no current torch or transformers. No torch here.

Each is made once, by venv and pip, in llmq's cache; it is there when it can import the library, or not at all.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from llmq.profiles.cache import cache_dir, locked, require_free_space, whole_folder
from llmq.profiles.errors import FailedError
from llmq.profiles.progress import Progress, silent

PYTHON = (3, 11)
_VERSION = ".".join(map(str, PYTHON))
_POLL_S = 0.5
# Of the environments that were made so far; builds of torch for CUDA take more, and pip says where that does not fit.
_LEAST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Environment:
    """A Python 3.11 with `requirements`, lines as pip reads them, in which `module` can be imported."""

    name: str
    requirements: str
    module: str

    @property
    def folder(self) -> Path:
        """Where it is or will be; other requirements are another environment."""
        digest = hashlib.sha256(f"{_VERSION}\n{self.requirements}".encode()).hexdigest()
        return cache_dir() / "environments" / f"{self.name}-{digest[:10]}"

    @property
    def exists(self) -> bool:
        return self.folder.exists()

    def python(self, progress: Progress = silent) -> Path:
        """Its interpreter, after making the environment where it is not there yet.

        Raises FailedError where that cannot be: no Python 3.11, a package that pip cannot get, a full disk.
        """
        if not self.exists:
            base = find_python()
            with locked(self.folder):
                if not self.exists:
                    self._make(base, progress)
        return _interpreter(self.folder)

    def _make(self, base: str, progress: Progress) -> None:
        require_free_space(self.folder.parent, _LEAST_BYTES, f"the environment of {self.name}")
        with whole_folder(self.folder) as partial:
            work = partial / "tmp"  # pip's downloads and builds: seen by the progress, and gone with the folder
            work.mkdir()
            requirements = work / "requirements.txt"
            requirements.write_text(self.requirements)
            pip = ("-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")
            python = str(_interpreter(partial))
            for stage, command in (
                ("making", [base, "-m", "venv", str(partial)]),
                ("making", [python, *pip, "-r", str(requirements)]),
                ("trying", [python, "-I", "-c", f"import {self.module}"]),
            ):
                self._run(stage, command, partial, progress)
            shutil.rmtree(work)

    def _run(self, stage: str, command: list[str], partial: Path, progress: Progress) -> None:
        what = f"{stage} the environment of {self.name}"
        environment = {**clean_environment(), "TMPDIR": str(partial / "tmp")}
        with (
            open(partial / "tmp" / "log", "w+", encoding="utf-8", errors="replace") as log,
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process,
        ):
            try:
                while not _ended(process):
                    progress(what, _bytes_in(partial), None, unit="B")
            except BaseException:
                process.kill()
                raise
            log.seek(0)
            output = log.read()
        if process.returncode:
            raise FailedError(f"{what} failed: {_reason(output)}")


def find_python() -> str:
    """A Python 3.11 that can make environments: this one, or python3.11 on PATH. Raises FailedError for none."""
    if sys.version_info[:2] == PYTHON:
        candidates = [sys.executable]
    else:
        found = shutil.which(f"python{_VERSION}")
        candidates = [found] if found else []
    for candidate in candidates:
        # A shim may be there without the Python behind it, and Debian's Python without what venv needs.
        probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        tried = subprocess.run(
            [candidate, "-c", probe], capture_output=True, text=True, check=False, env=clean_environment()
        )
        if tried.returncode == 0 and tried.stdout.strip() == _VERSION:
            return candidate
        raise FailedError(
            f"{candidate} cannot make a virtual environment: {_reason(tried.stderr)}; on Debian and Ubuntu: "
            f"apt install python{_VERSION}-venv"
        )
    raise FailedError(
        f"this needs a Python {_VERSION}, which the archived libraries run on: this is Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}, and there is no python{_VERSION} on PATH"
    )


def clean_environment() -> dict[str, str]:
    """os.environ without what would make another Python look for modules in this one's folders."""
    leaking = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in leaking}


def _ended(process: subprocess.Popen) -> bool:
    """Whether it has; after waiting for that a moment."""
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _interpreter(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _reason(output: str) -> str:
    """The line of a failed command's output that says why, in pip's or Python's manner."""
    if os.strerror(errno.ENOSPC) in output:
        return f"{os.strerror(errno.ENOSPC)} in {cache_dir()}; set LLMQ_CACHE to a folder on a larger disk"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return "; ".join(errors[-2:]) or (lines[-1] if lines else "it said nothing")


def _bytes_in(folder: Path) -> int:
    total, pending = 0, [str(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:  # pip removes its own folders meanwhile
            continue
    return total
