"""vLLM's start-up log: what it says of its memory, and overheads fitted to it."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from llmq.profiles.engine_overheads import DRIVER, NOT_TORCH, PADDING, ROTARY_TABLE, Evidence, Overhead
from llmq.profiles.errors import InputError

_GIB = 2**30
_ROUNDING_BYTES = 0.01 * _GIB  # of a figure with two places, and of ranks that differ
_OTHER_MODEL = 0.1  # weights further off than that are not this model's


@dataclass(frozen=True)
class VllmLog:
    """Of one rank, in bytes; None: not in the log. Of several ranks: the smallest pool and the largest rest."""

    memory_bytes: float | None
    utilization: float | None
    weight_bytes: float
    activation_bytes: float | None
    not_torch_bytes: float | None
    kv_bytes: float
    ranks: int | None
    max_model_len: int | None
    num_tokens: int | None  # max_num_batched_tokens
    num_seqs: int | None

    @classmethod
    def read(cls, path: Path) -> "VllmLog":
        """Raises InputError for a file that is no such log."""
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InputError(f"--calibrate {path}: {error.strerror}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "the log") -> "VllmLog":
        weights, kv = _figure(text, _WEIGHTS, max), _figure(text, _KV, min)
        if weights is None or kv is None:
            lacking = " and ".join(
                words
                for words, found in (("'Model loading took … GiB'", weights), ("'Available KV cache memory'", kv))
                if found is None
            )
            raise InputError(f"--calibrate {name}: no start-up log of vLLM, or not all of it: {lacking} is not there")
        total = _figure(text, _TOTAL, min)
        return cls(
            memory_bytes=total and total * _GIB,
            utilization=_figure(text, _SHARE, min),
            weight_bytes=weights * _GIB,
            activation_bytes=_scaled(_figure(text, _ACTIVATIONS, max)),
            not_torch_bytes=_scaled(_figure(text, _NOT_TORCH, max)),
            kv_bytes=kv * _GIB,
            ranks=_whole(text, r"tensor_parallel_size'?[=:]\s*(\d+)"),
            max_model_len=_whole(text, r"max_(?:seq|model)_len'?[=:]\s*(\d+)"),
            num_tokens=_whole(text, r"max_num_batched_tokens'?[=:]\s*(\d+)"),
            num_seqs=_whole(text, r"max_num_seqs'?[=:]\s*(\d+)"),
        )


# As versions from 0.5 to 0.32 write them.
_NUMBER = r"\s*(-?\d+(?:\.\d+)?)"
_WEIGHTS = (
    rf"[Mm]odel weights take{_NUMBER}\s*Gi?B",
    rf"Model loading took{_NUMBER}\s*Gi?B",
    rf"Loading model weights took{_NUMBER}\s*Gi?B",
)
_KV = (
    rf"reserved for KV Cache is{_NUMBER}\s*GiB",
    rf"[Aa]vailable KV cache memory:{_NUMBER}\s*GiB",
    rf"available_kv_cache_memory{_NUMBER}\s*GiB",
)
_ACTIVATIONS = (
    rf"PyTorch activation peak memory(?: takes)?{_NUMBER}\s*GiB",
    rf"torch peak memory increase:{_NUMBER}\s*GiB",
)
_NOT_TORCH = (rf"non_torch_memory(?: takes)?{_NUMBER}\s*GiB", rf"non-torch forward increase memory:{_NUMBER}\s*GiB")
_TOTAL = (rf"total_gpu_memory\s*\(?{_NUMBER}\s*GiB", rf"Free memory on device[^\n]*?/{_NUMBER}\s*GiB")
_SHARE = (
    rf"gpu_memory_utilization\s*\({_NUMBER}\)",
    rf"gpu_memory_utilization'?[=:]{_NUMBER}",
    rf"gpu_memory_utilization\s+{_NUMBER}",
    rf"Requested memory:{_NUMBER} \(util\)",
)


def _figure(text: str, patterns: Iterable[str], choose: Callable[[list[float]], float]) -> float | None:
    """The first pattern that is in the text decides: later ones are other words for it."""
    for pattern in patterns:
        if found := re.findall(pattern, text):
            return choose([float(one) for one in found])
    return None


def _whole(text: str, pattern: str) -> int | None:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else None


def _scaled(gib: float | None) -> float | None:
    return None if gib is None else gib * _GIB


def calibrated(
    rows: tuple[Overhead, ...], of_log: tuple[Overhead, ...], log: VllmLog, requested_bytes: float
) -> tuple[Overhead, ...]:
    """`rows`, predicted for what is asked, fitted to a log for whose settings `of_log` are predicted.

    What the log names takes its figure, scaled by how the prediction changes from the log's settings to those asked
    for; what of the memory that it was given (`requested_bytes`) neither the log nor a row names is a row of its own,
    which may be negative. Only that change is uncertain. Raises InputError where its weights are not this model's.
    """
    was = {row.name: row for row in of_log}
    predicted = sum(row.expected for row in of_log if row.name in _LOADED)
    if abs(log.weight_bytes / predicted - 1) > _OTHER_MODEL:
        raise InputError(
            f"--calibrate: the log loaded {log.weight_bytes / _GIB:.2f} GiB of weights a rank, and this model has "
            f"{predicted / _GIB:.2f}: it is of another model, --tp or format (--weights)"
        )
    logged = {"activations": log.activation_bytes, NOT_TORCH: log.not_torch_bytes}
    fitted, rest = [], requested_bytes - log.kv_bytes - log.weight_bytes
    for row in rows:
        if row.name in (*_LOADED, DRIVER):
            continue
        before = was[row.name].expected if logged.get(row.name) is None else logged[row.name]
        expected = before * row.expected / was[row.name].expected
        rest -= before
        slack = _ROUNDING_BYTES + _CHANGE_OFF * abs(expected - before)
        how = row.how if logged.get(row.name) is None else "as logged"
        fitted.append(_calibrated(row.name, expected, slack, how))
    return (
        _calibrated("weights", log.weight_bytes, _ROUNDING_BYTES, "as logged"),
        *fitted,
        _calibrated("not explained", rest, _ROUNDING_BYTES, "what the log's memory leaves over"),
    )


_LOADED = ("weights", PADDING, ROTARY_TABLE)  # what an engine logs as one figure
_CHANGE_OFF = 0.1  # of how much a row changes with the step


def _calibrated(name: str, expected: float, slack: float, how: str) -> Overhead:
    return Overhead(name, expected - slack, expected, expected + slack, Evidence.CALIBRATED, how)
