"""Kernels of our own. `native` is the compiled module, None where it was not built or this CPU runs none of it;
`triton` holds those for GPUs, in Python that the package of that name compiles."""

import os
from importlib.util import find_spec
from types import ModuleType

__all__ = ["interpreted", "native", "triton_runs", "why_absent"]

native: ModuleType | None
why_absent: str  # for people; empty where it is there

try:
    from llmq.runtime.kernels import _native as native
except ImportError as error:
    native, why_absent = None, f"not built when llmq was installed ({error})"
else:
    why_absent = ""
    if native.isa() == "none":
        native, why_absent = None, "this CPU has no AVX2"


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors: by the variable that Triton itself reads."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_runs(device_type: str) -> bool:
    """Whether Triton's kernels run on tensors of a "cuda" or "cpu" device here."""
    return (device_type == "cuda" or interpreted()) and find_spec("triton") is not None
