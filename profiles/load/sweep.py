"""The highest rate that a server bears: doubling until it does not, then bisection."""

from collections.abc import Awaitable, Callable

Bears = Callable[[float], Awaitable[bool]]


async def highest_rate(
    bears: Bears, *, start: float, most: float, tolerance: float = 0.05, least: float = 1e-3
) -> float | None:
    """The highest rate found for which `bears(rate)` holds, taking it to hold below any rate for which it holds.

    From `start` the rate is doubled up to `most` while it holds, or halved down to `least` until it does; then the
    interval between the highest that holds and the lowest that does not is halved until it is within `tolerance` of the
    lower end. None: not even `least` holds. About 2 + log2(1 / tolerance) calls beyond the doublings.
    """
    good, bad = None, None
    rate = start
    while good is None or bad is None:
        if await bears(rate):
            good = rate
            if rate >= most:
                return good
            rate = min(rate * 2, most)
        else:
            bad = rate
            rate /= 2
            if good is None and rate < least:
                return None
    while bad - good > tolerance * good:
        rate = (good + bad) / 2
        if await bears(rate):
            good = rate
        else:
            bad = rate
    return good
