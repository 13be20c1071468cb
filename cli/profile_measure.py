"""What this machine does: its bandwidth and FLOP/s by torch, and steps of the engine on a model."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.profiles.errors import FailedError
from llmq.profiles.roofline import Machine

if TYPE_CHECKING:
    from llmq.runtime.engine import Engine

_BUFFER_BYTES = 256 * 2**20  # far more than any cache
_MATRIX = 1024
_REPEATS = 5
_DECODE_STEPS = 8
_ALL_STEPS = _DECODE_STEPS + 4  # with the first token, those under the profiler, and one that is never reached
_PREFILL_TOKENS = 512  # of a step, as llmq serve's


@dataclass(frozen=True)
class MeasuredStep:
    """The fastest of several steps, and the operations of one more by their share of its time."""

    seconds: float
    operations: tuple[tuple[str, float], ...] = ()  # (name, share of the step), the largest first


def measure_machine(threads: int | None, dtype: str) -> Machine:
    """Bandwidth: a buffer of 256 MiB read by a sum, or copied (read and written), whichever moves more bytes.
    FLOP/s: a product of two [1024, 1024] matrices in `dtype`. The best of several tries: a floor is for a machine
    that is left alone."""
    import torch

    from llmq.profiles.machine import cpu_name, usable_cores
    from llmq.runtime.kv_codec import TORCH_DTYPES

    num_threads = threads or usable_cores()
    torch.set_num_threads(num_threads)
    source = torch.ones(_BUFFER_BYTES // 4)
    target = torch.empty_like(source)
    bandwidth = max(
        _BUFFER_BYTES / _fastest(lambda: source.sum()), 2 * _BUFFER_BYTES / _fastest(lambda: target.copy_(source))
    )
    left = torch.randn(_MATRIX, _MATRIX).to(TORCH_DTYPES[dtype])
    flops = 2 * _MATRIX**3 / _fastest(lambda: left @ left)
    how = f"measured on {num_threads} thread{'s' * (num_threads > 1)}: best of {_REPEATS}"
    return Machine(cpu_name(), bandwidth, flops, how)


def load_engine(folder: Path, *, batch: int, kv_dtype: str, threads: int | None) -> "Engine":
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.engine import Engine

    return Engine.from_config(
        EngineConfig(
            model=str(folder),
            kv_dtype=kv_dtype,
            device="cpu",
            threads=threads,
            max_num_seqs=batch,
            max_num_batched_tokens=_PREFILL_TOKENS + batch,
            enable_prefix_caching=False,
        )
    )


def measure_prefill(engine: "Engine", num_tokens: int) -> MeasuredStep:
    """A prompt alone, through all its steps to its first token."""
    _add(engine, 1, num_tokens, 1)
    started_s = time.perf_counter()
    while engine.has_unfinished_requests:
        engine.step()
    return MeasuredStep(time.perf_counter() - started_s)


def measure_decode(engine: "Engine", batch: int, context: int) -> MeasuredStep:
    """Steps of `batch` sequences of about `context` tokens that bring each one token. Raises FailedError where the
    KV-cache does not hold them all."""
    most_outputs = _ALL_STEPS + -(-batch * context // _PREFILL_TOKENS) + 1  # the first decode while others are read
    num_prompt = max(1, min(context - _ALL_STEPS, engine.info.max_model_len - most_outputs))
    names = _add(engine, batch, num_prompt, most_outputs)
    while engine.scheduler.waiting or any(not request.num_output_tokens for request in engine.scheduler.running):
        engine.step()
    if len(engine.scheduler.running) < batch:
        raise FailedError(
            f"{batch} sequences of {context} tokens do not fit in this machine's KV-cache at once: a smaller --batch "
            "or --ctx, or --gpu for the floor alone"
        )
    seconds = min(_timed(engine.step) for _ in range(_DECODE_STEPS))
    operations = _operations(engine.step)
    engine.abort(names)
    return MeasuredStep(seconds, operations)


def _operations(work: Callable[[], object]) -> tuple[tuple[str, float], ...]:
    """Shares of the step's time, each operation's own; what torch did not do is "outside torch's operations"."""
    from torch.autograd.profiler import profile

    with _quiet_stderr():
        with profile():
            work()  # the first step under a profiler carries its start-up
        with profile() as profiler:
            seconds = _timed(work)
    own = [(event.key, event.self_cpu_time_total / 1e6 / seconds) for event in profiler.key_averages()]
    rest = max(0.0, 1 - sum(share for _, share in own))
    return tuple(sorted([*own, ("outside torch's operations", rest)], key=lambda one: -one[1]))


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """torch's profiler writes a line when it starts and one when it ends, at every level of its log."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _add(engine: "Engine", count: int, num_prompt_tokens: int, num_output_tokens: int) -> list[str]:
    from llmq.profiles.load.generator import random_prompt_ids
    from llmq.runtime.request import EngineRequest
    from llmq.runtime.sampling_params import SamplingParams

    names = [f"profile-{number}" for number in range(count)]
    for name in names:
        engine.add_request(
            EngineRequest(
                request_id=name,
                prompt_token_ids=random_prompt_ids(name, num_prompt_tokens, engine.info.vocab_size),
                sampling_params=SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True),
                arrival_time_s=time.monotonic(),
            )
        )
    return names


def _fastest(work: Callable[[], object]) -> float:
    work()
    return min(_timed(work) for _ in range(_REPEATS))


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
