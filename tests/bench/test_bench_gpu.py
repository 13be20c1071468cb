"""The GPU's script where there is no GPU, in an interpreter that does not know this package."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "bench_gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, "-I", str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "no GPU: torch sees no CUDA device here\n"
