"""The GPU's script where there is no GPU, in an interpreter that does not know this package."""

import json
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
    assert done.stderr == "no GPU: torch sees no CUDA device here (--dry-run tries everything on a CPU)\n"


def test_a_dry_run_makes_every_row(tmp_path):
    """All that the first GPU will run, at tiny sizes: kernels, whole models, their peer, and the table."""
    pytest.importorskip("triton", reason="no triton here: pip install -e '.[triton]'")
    pytest.importorskip("transformers", reason="no transformers here: pip install -e '.[quantize]'")
    path = tmp_path / "found.json"
    command = [sys.executable, "-I", str(SCRIPT), "--dry-run", "--seconds", "1200", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert not found["failed"] + found["not_timed"] + found["no_time"]
    assert (found["right"], found["wrong"]) == (found["cases"], [])
    rows = found["rows"]
    assert all(row["us"] > 0 and row["floor_us"] > 0 for row in rows)
    assert len({(row["section"], row["what"]) for row in rows}) == len(rows)
    # The peer; of each form one workload, two decodes and a prefill; and weights, decode and prefill, experts, row
    # kernels, sampling.
    assert len(rows) == 1 + 3 * 4 + 2 * 2 + 3 * (2 + 2) + 2 + 3 * 2 + 1
    assert sum(line.startswith(rows[0]["section"]) for line in done.stdout.splitlines()) == 1
    served = {row["section"]: row["note"] for row in rows if row["what"].startswith("served")}
    # Of one model in float32 the engine and transformers make the same tokens.
    assert served["tiny 16 bit"].endswith("× transformers (100 % of its tokens)")
    assert all("× transformers" in note for name, note in served.items() if name != "tiny peer")
