"""An environment of its own: made once, whole or not at all, and clear words where the machine cannot."""

import errno
import os
import subprocess
import sys
import zipfile

import pytest

from llmq.profiles.errors import FailedError
from llmq.profiles.progress import silent
from llmq.quantize.backends import environment as environment_module
from llmq.quantize.backends.environment import Environment, find_python


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing here asks a package index
    return tmp_path / "cache"


def wheel(folder, content="answer = 42\n"):
    """A wheel of one module, `tinylib`, that needs nothing."""
    path = folder / "tinylib-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tinylib.py", content)
        file.writestr("tinylib-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinylib\nVersion: 1.0\n")
        file.writestr("tinylib-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tinylib-1.0.dist-info/RECORD", "")
    return path


def needs_python():
    try:
        find_python()
    except FailedError as error:
        pytest.skip(str(error))


def left_behind(cache):
    folder = cache / "environments"
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")] if folder.exists() else []


@pytest.mark.system  # a real venv and a real pip: seconds
def test_made_once_and_apart_from_this_one(tmp_path, cache, monkeypatch):
    needs_python()
    (tmp_path / "leak").mkdir()
    (tmp_path / "leak" / "tinylib.py").write_text("answer = 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "leak"))
    made, seen = Environment("tiny", f"# a comment\n{wheel(tmp_path)}\n", "tinylib"), []
    assert not made.exists
    python = made.python(lambda stage, done, total, unit="": seen.append((stage, done, unit)))
    assert made.exists
    assert left_behind(cache) == [made.folder.name]
    assert not (made.folder / "tmp").exists()
    answer = subprocess.run(
        [python, "-I", "-c", "import tinylib; print(tinylib.answer)"], capture_output=True, text=True
    )
    assert answer.stdout == "42\n"
    assert subprocess.run([python, "-I", "-c", "import torch"], capture_output=True).returncode
    assert ("making the environment of tiny", "B") in {(stage, unit) for stage, _, unit in seen}
    assert max(done for _, done, _ in seen) > 10**6
    monkeypatch.setattr(Environment, "_make", lambda *_: pytest.fail("it was made twice"))
    assert made.python() == python
    assert Environment("tiny", "other==1\n", "tinylib").folder != made.folder


def fake_python(folder, *, pip="exit 0", imports="exit 0"):
    """A base interpreter whose venv holds a copy of itself, in which pip and an import do as told."""
    path = folder / "fake-python"
    path.write_text(
        f"""#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install "*) {pip} ;;
  "-I -c import tinylib") {imports} ;;
  *) exit 9 ;;
esac
"""
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("doings", "words"),
    [
        (
            {"pip": "echo 'ERROR: No matching distribution found for tinylib==9'; exit 1"},
            r"^making the environment of tiny failed: No matching distribution found for tinylib==9$",
        ),
        (
            {"imports": "echo Traceback; echo 'ImportError: libcudart.so.12: cannot open it'; exit 1"},
            r"^trying the environment of tiny failed: ImportError: libcudart\.so\.12: cannot open it$",
        ),
        (
            {"pip": f"echo 'ERROR: [Errno 28] {os.strerror(errno.ENOSPC)}'; exit 1"},
            r"No space left on device in .*cache; set LLMQ_CACHE to a folder on a larger disk$",
        ),
        ({"pip": "exit 1"}, r"failed: it said nothing$"),
    ],
    ids=["no package", "no import", "full disk", "silence"],
)
def test_what_fails_is_said_and_leaves_nothing(cache, tmp_path, doings, words):
    with pytest.raises(FailedError, match=words):
        Environment("tiny", "tinylib==9", "tinylib")._make(fake_python(tmp_path, **doings), silent)
    assert left_behind(cache) == []


def test_nothing_is_left_of_what_pip_worked_on(cache, tmp_path):
    made = Environment("tiny", "tinylib==9", "tinylib")
    made._make(fake_python(tmp_path, pip='echo $TMPDIR/requirements.txt > "$TMPDIR/asked"'), silent)
    assert [path.name for path in made.folder.iterdir()] == ["bin"]


def test_no_room_is_refused_before_anything_is_made(cache, monkeypatch):
    monkeypatch.setattr(environment_module, "_LEAST_BYTES", 2**60)
    with pytest.raises(FailedError, match=r"the environment of tiny needs .* are free"):
        Environment("tiny", "", "tinylib")._make(sys.executable, silent)
    assert left_behind(cache) == []


def test_an_interrupted_making_ends_its_pip_and_leaves_nothing(cache, tmp_path):
    pid_file, fake = tmp_path / "pid", tmp_path / "slow"
    fake.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 60\n")
    fake.chmod(0o755)

    def interrupt(*_, **__):
        if pid_file.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Environment("tiny", "", "tinylib")._make(str(fake), interrupt)
    assert left_behind(cache) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_python_is_looked_for_on_the_path_and_missed_aloud(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 1, "final", 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FailedError, match=r"needs a Python 3\.11.*this is Python 3\.13, and there is no python3\.11"):
        find_python()
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.11: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    with pytest.raises(FailedError, match=r"cannot make a virtual environment: pyenv: python3\.11: command not found"):
        find_python()
    shim.write_text("#!/bin/sh\necho 3.11\n")
    assert find_python() == str(shim)
