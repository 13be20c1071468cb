"""Whether a server kept up with what was sent to it."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from llmq.profiles.load.metrics import RequestRecord

# Of an open loop: the queue must have grown by this share of what was sent, by so many times its square root (which is
# how far chance alone takes a count of arrivals), and by so many; and TTFT by this factor. Simulated (Poisson, uniform
# service times, 1 to 64 places, 100 requests): said of up to 1.5 % of runs at a load of 0.8, 76 to 84 % at 1.25,
# and 98 % and more at 1.5; with 300 requests of none at 0.8 and 97 % and more at 1.25.
GROWTH_SHARE, GROWTH_ROOTS, GROWTH_LEAST, TTFT_FACTOR = 0.1, 1.5, 4, 1.5
LEAST_REQUESTS = 9  # three thirds of three


@dataclass(frozen=True)
class Saturation:
    """Between the first measured request due and the last one: what was sent, what was finished, and TTFT's medians
    over the first and the last third of the requests. TTFT is None where a third was not answered at all."""

    window_s: float
    num_sent: int
    num_finished: int
    in_flight_begin: int
    in_flight_end: int
    ttft_begin_s: float | None
    ttft_end_s: float | None

    @classmethod
    def of(cls, records: Sequence[RequestRecord], num_warmup: int = 0) -> "Saturation | None":
        """`records` in the order in which they were due, the warm-up first. None: too few to tell."""
        measured = records[num_warmup:]
        if len(measured) < LEAST_REQUESTS:
            return None
        due_s = sorted(one.scheduled_s for one in records)
        ends_s = sorted(one.end_s for one in records)
        begin_s, end_s = measured[0].scheduled_s, measured[-1].scheduled_s

        def in_flight(time_s: float) -> int:
            return bisect_right(due_s, time_s) - bisect_right(ends_s, time_s)

        third = len(measured) // 3
        return cls(
            window_s=end_s - begin_s,
            num_sent=bisect_right(due_s, end_s) - bisect_left(due_s, begin_s),
            num_finished=bisect_right(ends_s, end_s) - bisect_right(ends_s, begin_s),
            in_flight_begin=in_flight(begin_s),
            in_flight_end=in_flight(end_s),
            ttft_begin_s=_median_ttft(measured[:third]),
            ttft_end_s=_median_ttft(measured[-third:]),
        )

    @property
    def is_over(self) -> bool:
        """Requests came faster than they were finished: the latencies are those of a queue that grows while it is
        watched, and a longer run would show larger ones."""
        growth = self.in_flight_end - self.in_flight_begin
        if growth < max(GROWTH_LEAST, GROWTH_SHARE * self.num_sent, GROWTH_ROOTS * math.sqrt(self.num_sent)):
            return False
        if self.ttft_end_s is None:
            return True
        return self.ttft_begin_s is not None and self.ttft_end_s >= TTFT_FACTOR * self.ttft_begin_s


def _median_ttft(records: Sequence[RequestRecord]) -> float | None:
    known = [one.ttft_s for one in records if one.error is None and one.ttft_s is not None]
    return median(known) if known else None
