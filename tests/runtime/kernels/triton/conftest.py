"""These tests run in a process of their own, where Triton interprets its kernels (`test_triton.py`), or on a GPU."""

from importlib.util import find_spec

import pytest
import torch

from llmq.runtime.kernels import interpreted

if find_spec("triton") is None or not (interpreted() or torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def place(request):
    """(seed, dtype) -> where to run. In the interpreter launches are planned for a small and for a large Hopper GPU."""
    from triton_cases import Place

    from llmq.runtime.kernels.triton.launch import Target

    seed, dtype = request.param
    device = torch.device("cpu" if interpreted() else "cuda")
    target = Target("cuda", 90, 132) if seed % 3 == 0 and interpreted() else Target.of(device)
    return Place(device, target, dtype, seed)
