"""Memory that the C library keeps of what was freed, given back."""

import ctypes
import functools
import sys
from collections.abc import Callable


def release_memory() -> None:
    """Give the heap's free pages back to the system: freed pieces of many sizes between live ones make it grow from
    linear to linear and from decoder layer to decoder layer. Does nothing where the C library is not glibc."""
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    if not sys.platform.startswith("linux"):
        return lambda _: None
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
