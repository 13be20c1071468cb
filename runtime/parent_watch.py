"""A process that ends with its parent, whatever the parent dies of: the parent keeps this one's stdin open."""

import contextlib
import os
import signal
import sys
import threading


def die_with_parent() -> None:
    """Leave no orphan: on Linux the kernel kills this process at once, elsewhere the end of stdin does."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

    def wait_for_end_of_stdin() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin.read: its lock would be held when Python ends
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end_of_stdin, daemon=True, name="parent-watch").start()
