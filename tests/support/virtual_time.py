"""An event loop whose clock jumps to the next timer instead of waiting: timings are exact, and tests take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout=None):
        if timeout is not None and timeout > 0:
            self.now_s += timeout
        return super().select(0)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` on a loop whose `time()` begins at 0 and where nothing but sleeping takes time."""
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(work)
