"""The tests in `triton/`, in a process where Triton interprets its kernels: it reads the variable when one is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_in_the_interpreter(file):
    pytest.importorskip("triton", reason="no triton here: pip install -e '.[triton]'")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout
