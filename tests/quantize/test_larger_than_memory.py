"""A model that does not fit into memory is quantized: the kernel gives the process less than the model takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmq.profiles.checkpoint import read_checkpoint
from llmq.quantize.preflight import preflight
from llmq.quantize.recipe import Recipe
from llmq.quantize.sizes import peak_memory

# RLIMIT_DATA counts what a process allocates and what it maps to write into, not the files that it reads. What imports
# and a first run of the same kind took is not of the model: the limit is set above it.
LIMITED = """
import resource, sys
from pathlib import Path
import torch
from conftest import quantize_in_one_call

small, large, out, calib, method, room = sys.argv[1:]
torch.set_num_threads(1)
quantize_in_one_call(Path(small), Path(out) / "small", method, Path(calib), memory_bytes=2**18)
status = Path("/proc/self/status").read_text()
used = int(status.partition("VmData:")[2].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + int(room), resource.RLIM_INFINITY))
quantize_in_one_call(Path(large), Path(out) / "large", method, Path(calib), memory_bytes=2**18)
try:
    torch.zeros(int(room) + 2**20, dtype=torch.uint8)
except RuntimeError:
    print("held")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts allocations on Linux alone")
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_model_is_quantized_in_the_memory_that_was_foretold(tiny_llama, calibration_jsonl, tmp_path, method):
    """Which is less than its weights take: each of its layers is a fifth of it at most."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "dtype": "bfloat16"}
    small, large = tiny_llama(**shape, num_hidden_layers=1), tiny_llama(**shape, num_hidden_layers=18)
    source = read_checkpoint(large)
    plan = preflight(source, Recipe.of(method), tmp_path / "large")
    num_tokens, longest = (16 * 48, 48) if plan.recipe.is_calibrated else (0, 0)
    room = peak_memory(source, plan.targets, plan.settings, num_tokens, longest) + 4 * 2**20
    layer = sum(info.num_bytes for name, info in source.tensors.items() if name.startswith("model.layers.0."))
    assert layer < room / 4
    assert source.total_bytes > room
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, small, large, tmp_path, calibration_jsonl, method, str(room)],
        capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "held\n"
    assert len(read_checkpoint(tmp_path / "large").tensors) > 18 * 9
