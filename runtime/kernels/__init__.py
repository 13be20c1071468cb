"""Kernels of our own. `native` is the compiled module, None where it was not built or this CPU runs none of it."""

from types import ModuleType

__all__ = ["native", "why_absent"]

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
