"""Arrivals: when requests come and how long they are. From real traces, or drawn from a distribution."""

import csv
import json
import random
from collections.abc import Iterator, Sequence
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


def read_azure(path: Path) -> list[Arrival]:
    """An Azure LLM inference trace: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Raises InputError."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [
                (_azure_time_s(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)
            ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a trace of TIMESTAMP, ContextTokens, GeneratedTokens ({error!r})") from None
    return _from_start(Arrival(*row) for row in rows)


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
    return _from_start(arrivals)


def read_trace(path: Path) -> list[Arrival]:
    """`.csv` as Azure's, `.jsonl` as Mooncake's. Raises InputError."""
    readers = {".csv": read_azure, ".jsonl": read_mooncake}
    path = Path(path)
    if path.suffix not in readers:
        raise InputError(f"{path}: a trace is .csv (Azure's columns) or .jsonl (Mooncake's)")
    if not path.is_file():
        raise InputError(f"{path}: there is no such trace")
    return readers[path.suffix](path)


def replay(arrivals: Sequence[Arrival], *, speed: float = 1.0, duration_s: float | None = None) -> list[Arrival]:
    """The trace `speed` times as fast, cut to what is due within `duration_s` of the replay."""
    if speed <= 0:
        raise InputError(f"speed {speed}: must be above 0")
    faster = (replace(one, time_s=one.time_s / speed) for one in arrivals)
    return [one for one in faster if duration_s is None or one.time_s < duration_s]


def poisson(lengths: Sequence[Arrival], *, rate_per_s: float, seed: int = 0) -> list[Arrival]:
    """The same lengths, in order, as a Poisson process from 0 on: gaps are exponential with mean 1 / rate."""
    if rate_per_s <= 0:
        raise InputError(f"rate {rate_per_s}: must be above 0 requests a second")
    random_gaps = random.Random(seed)
    arrivals, time_s = [], 0.0
    for one in lengths:
        arrivals.append(replace(one, time_s=time_s))
        time_s += random_gaps.expovariate(rate_per_s)
    return arrivals


def _azure_time_s(text: str) -> float:
    """Seconds of 2023-11-16 18:15:46.6805900: seven decimals are one more than datetime reads."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


def _from_start(arrivals: Iterator[Arrival] | Sequence[Arrival]) -> list[Arrival]:
    ordered = sorted(arrivals, key=lambda one: one.time_s)
    return [replace(one, time_s=one.time_s - ordered[0].time_s) for one in ordered]
