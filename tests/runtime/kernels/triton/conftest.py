"""These tests run in a process of their own, where Triton interprets its kernels, or on a GPU: `test_triton.py`."""

import os

import pytest
import torch
from triton_cases import Place

from llmq.runtime.kernels.triton.launch import Target

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def place(request) -> Place:
    """(seed, dtype) -> where to run. In the interpreter launches are planned for a small and for a large Hopper GPU."""
    seed, dtype = request.param
    device = torch.device("cpu" if IS_INTERPRETED else "cuda")
    target = Target("cuda", 90, 132) if seed % 3 == 0 and IS_INTERPRETED else Target.of(device)
    return Place(device, target, dtype, seed)
