"""Arrivals: when requests come and how long they are. From real traces, or drawn from a distribution."""

import csv
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from llmq.profiles.errors import InputError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Arrival:
    """One request of a workload: when it is due, counted from the start, and its lengths in tokens."""

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    # Mooncake: one id for each block of 512 prompt tokens (the last may be partial). Equal ids, equal whole prefixes.
    hash_ids: tuple[int, ...] = ()


def read_csv(path: Path) -> list[Arrival]:
    """A CSV trace: Azure's (TIMESTAMP, ContextTokens, GeneratedTokens) or one's own (arrival_s, prompt_tokens,
    output_tokens), told apart by the header. Raises InputError."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            layout = next((one for one in _CSV_LAYOUTS if {*one[:3]} <= {*(rows.fieldnames or ())}), None)
            if layout is None:
                raise ValueError(f"its columns are {', '.join(rows.fieldnames or ()) or 'none'}")
            time, prompt, output, seconds = layout
            found = [Arrival(seconds(row[time]), int(row[prompt]), int(row[output])) for row in rows]
    except (TypeError, ValueError, csv.Error) as error:
        wanted = " nor of ".join(", ".join(one[:3]) for one in _CSV_LAYOUTS)
        raise InputError(f"{path}: a trace neither of {wanted} ({error})") from None
    return _checked(path, found)


def read_mooncake(path: Path) -> list[Arrival]:
    """A Mooncake trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids. Raises InputError."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        arrivals = [
            Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a Mooncake trace ({error!r})") from None
    return _checked(path, arrivals)


def read_trace(path: Path) -> list[Arrival]:
    """`.csv` as Azure's or one's own, `.jsonl` as Mooncake's; from 0 on, in order. Raises InputError."""
    readers = {".csv": read_csv, ".jsonl": read_mooncake}
    path = Path(path)
    if path.suffix not in readers:
        raise InputError(f"{path}: a trace is .csv (Azure's columns or one's own) or .jsonl (Mooncake's)")
    if not path.is_file():
        raise InputError(f"{path}: there is no such trace")
    return readers[path.suffix](path)


def replay(arrivals: Sequence[Arrival], *, speed: float = 1.0, duration_s: float | None = None) -> list[Arrival]:
    """The trace `speed` times as fast, cut to what is due within `duration_s` of the replay."""
    if speed <= 0:
        raise InputError(f"speed {speed}: must be above 0")
    faster = (replace(one, time_s=one.time_s / speed) for one in arrivals)
    return [one for one in faster if duration_s is None or one.time_s < duration_s]


def random_arrivals(
    lengths: Sequence[Arrival], *, rate_per_s: float, burstiness: float = 1.0, seed: int = 0
) -> list[Arrival]:
    """The same lengths, in order, at random times from 0 on: gaps are gamma with shape `burstiness` and mean 1 / rate.

    1: a Poisson process. Below 1 requests come in bursts, above 1 more evenly (the coefficient of variation of the gaps
    is 1 / sqrt(burstiness)). Rate infinity: all at once. Raises InputError.
    """
    if not rate_per_s > 0:
        raise InputError(f"rate {rate_per_s:g}: must be above 0 requests a second")
    if not 0 < burstiness < math.inf:
        raise InputError(f"burstiness {burstiness:g}: must be above 0; 1 is a Poisson process")
    random_gaps = random.Random(seed)
    arrivals, time_s = [], 0.0
    for one in lengths:
        arrivals.append(replace(one, time_s=time_s))
        time_s += random_gaps.gammavariate(burstiness, 1.0) / (rate_per_s * burstiness)
    return arrivals


def scaled(arrivals: Sequence[Arrival], scale: float) -> list[Arrival]:
    """Prompts and outputs `scale` times as long, each at least one token."""
    if not 0 < scale < math.inf:
        raise InputError(f"length scale {scale:g}: must be above 0")
    return [
        replace(
            one,
            num_prompt_tokens=max(1, round(one.num_prompt_tokens * scale)),
            num_output_tokens=max(1, round(one.num_output_tokens * scale)),
        )
        for one in arrivals
    ]


def _azure_time_s(text: str) -> float:
    """Seconds of 2023-11-16 18:15:46.6805900: seven decimals are one more than datetime reads."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


# Columns of (time, prompt tokens, output tokens), and the time's seconds.
_CSV_LAYOUTS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", _azure_time_s),
    ("arrival_s", "prompt_tokens", "output_tokens", float),
)


def _checked(path: Path, arrivals: Sequence[Arrival]) -> list[Arrival]:
    """In order, from 0 on. Raises InputError for an empty trace and for what no request can be."""
    if not arrivals:
        raise InputError(f"{path}: there is no request in this trace")
    for number, one in enumerate(arrivals, 1):
        if not math.isfinite(one.time_s) or one.num_prompt_tokens < 0 or one.num_output_tokens < 0:
            raise InputError(f"{path}: request {number} is none: {one}")
    ordered = sorted(arrivals, key=lambda one: one.time_s)
    return [replace(one, time_s=one.time_s - ordered[0].time_s) for one in ordered]
