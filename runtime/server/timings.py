"""What a call took, as the reply's `timings`: milliseconds, from the server's own clocks."""

from dataclasses import dataclass

from llmq.runtime.server.responses import Json


@dataclass
class SequenceTimes:
    """Of one sequence, in seconds; the ends count from the call's arrival."""

    queue_s: float | None = None
    first_output_s: float | None = None  # with a token: an error, or a prompt that is scored alone, brings none
    last_output_s: float | None = None
    num_later_tokens: int = 0  # after the first output

    def note(self, since_arrival_s: float, num_tokens: int, queue_s: float | None) -> None:
        if self.first_output_s is None:
            self.first_output_s = since_arrival_s if num_tokens else None
        else:
            self.num_later_tokens += num_tokens
        self.last_output_s = since_arrival_s
        self.queue_s = queue_s if self.queue_s is None else self.queue_s


def timings(sequences: list[SequenceTimes]) -> Json:
    """`queue_ms` until the call was first scheduled, `ttft_ms` until its first token (the queue included), `tpot_ms`
    per token after a sequence's first output, the mean of all, `total_ms` until its last. None: there was none."""
    queues = [one.queue_s for one in sequences if one.queue_s is not None]
    started = [one for one in sequences if one.first_output_s is not None]
    spans = [(one.last_output_s - one.first_output_s, one.num_later_tokens) for one in started if one.num_later_tokens]
    return {
        "queue_ms": _ms(min(queues, default=None)),
        "ttft_ms": _ms(min((one.first_output_s for one in started), default=None)),
        "tpot_ms": _ms(sum(span for span, _ in spans) / sum(steps for _, steps in spans)) if spans else None,
        "total_ms": _ms(max((one.last_output_s for one in sequences if one.last_output_s is not None), default=None)),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
