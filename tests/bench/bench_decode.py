"""Decode and prefill of whole models by the native program and by torch's: tokens a second, and what a token reads.

Programs take turns, and the median of the turns is shown: wall-clock time, or CPU time with --cpu-time (of one thread,
on a machine that others use too). A step's bytes are the weights that it multiplies with, each once, and the K and V of
all sequences; the share is of what this machine's memory gives a plain sum by as many threads.

    llmq quantize smollm2-135m --rtn --sym --group-size 64 --format gptq -o smol-4bit
    python tests/bench/bench_decode.py smollm2-135m smol-4bit --threads 2
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import bench_report
import numpy as np
import torch
from bench_report import Report, percent

from llmq.profiles.checkpoint import find_model
from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

PROGRAMS = ("torch", "native")
PROMPT_TOKENS = 128
_SUMMED_BYTES = 512 << 20

Clock = Callable[[], float]


def make_engine(model: str, kernels: str, arguments: argparse.Namespace) -> Engine:
    longest = max([*arguments.prefill, arguments.context + arguments.tokens])
    return Engine.from_config(
        EngineConfig(
            model=str(find_model(model)),
            dtype="bf16",
            kv_dtype=arguments.kv_dtype,
            kernels=kernels,
            head=arguments.head if kernels == "native" else "auto",
            activations=arguments.activations if kernels == "native" else "auto",
            threads=arguments.threads,
            max_model_len=longest + 8,
            max_num_seqs=max(arguments.batch),
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        )
    )


def prompt_of(num_tokens: int, row: int = 0) -> list[int]:
    return [(7 * position + 13 * row) % 1000 + 3 for position in range(num_tokens)]


def decode_seconds(engine: Engine, batch: int, arguments: argparse.Namespace, clock: Clock) -> float:
    """Of a whole engine step, scheduling and sampling included, that gives each of `batch` sequences a token."""
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    for row in range(batch):
        prompt = prompt_of(arguments.context, row)
        engine.add_request(EngineRequest(request_id=str(row), prompt_token_ids=prompt, sampling_params=params))
    times = []
    while engine.has_unfinished_requests:
        start = clock()
        outputs = engine.step()
        if len(outputs) == batch and all(output.new_token_ids for output in outputs):
            times.append(clock() - start)
    return median(times[1:])  # the first may have read the last of a prompt


def prefill_seconds(engine: Engine, num_tokens: int, clock: Clock) -> float:
    start = clock()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.add_request(EngineRequest(request_id="0", prompt_token_ids=prompt_of(num_tokens), sampling_params=params))
    while engine.has_unfinished_requests:
        engine.step()
    return clock() - start


def memory_bandwidth(clock: Clock) -> float:
    """Bytes a second that a sum reads from large pages, in which packed weights and the KV pool lie: numpy asks for
    them. In pages of 4 KiB, torch's own, it may be half as many."""
    numbers = torch.from_numpy(np.ones(_SUMMED_BYTES // 8, dtype=np.int64))
    times = []
    for _ in range(5):
        start = clock()
        numbers.sum()
        times.append(clock() - start)
    return _SUMMED_BYTES / median(times)


def weights_read_bytes(engine: Engine) -> int:
    """Of a step: all weights but the embedding's rows, which are looked up."""
    decoder = engine.executor.runner.program.model
    if getattr(decoder.head.linear, "weight", None) is decoder.embedding:
        return decoder.num_bytes
    return decoder.num_bytes - decoder.embedding.nbytes


def step_bytes(engine: Engine, batch: int, arguments: argparse.Namespace) -> int:
    """Weights, and K and V of the middle of the measurement."""
    layout = engine.executor.runner.store.layout
    tokens = arguments.context + arguments.tokens // 2
    return weights_read_bytes(engine) + batch * sum(group.bytes_per_token * tokens for group in layout.groups)


def measure(arguments: argparse.Namespace) -> Report:
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    bandwidth = memory_bandwidth(clock)
    rows, figures = [], []
    for model in arguments.models:
        engines = {kernels: make_engine(model, kernels, arguments) for kernels in arguments.programs}
        works = [("decode", batch) for batch in arguments.batch] + [("prefill", count) for count in arguments.prefill]
        for work, size in works:
            times: dict[str, list[float]] = {kernels: [] for kernels in arguments.programs}
            for _ in range(arguments.turns):
                for kernels, engine in engines.items():
                    if work == "decode":
                        times[kernels].append(decode_seconds(engine, size, arguments, clock))
                    else:
                        times[kernels].append(prefill_seconds(engine, size, clock))
            for kernels, engine in engines.items():
                seconds, tokens = median(times[kernels]), size
                figure = {
                    "model": model,
                    "work": f"{work} {size}",
                    "program": engine.info.fingerprint["program"],
                    "linear_kernels": engine.info.fingerprint["linear_kernels"],
                    "tokens_per_s": tokens / seconds,
                    "spread": max(times[kernels]) / min(times[kernels]) - 1,
                }
                if work == "decode":
                    num_bytes = step_bytes(engine, size, arguments)
                    figure |= {
                        "bytes_per_step": num_bytes,
                        "bytes_per_token": num_bytes / size,
                        "share_of_bandwidth": num_bytes / seconds / bandwidth,
                    }
                figures.append(figure)
                rows.append(
                    [
                        model.rsplit("/", 1)[-1],
                        figure["work"],
                        f"{figure['program']}, {figure['linear_kernels']}",
                        f"{figure['tokens_per_s']:,.1f}",
                        percent(figure["spread"]),
                        f"{figure['bytes_per_token'] / 1e6:,.1f}" if work == "decode" else "",
                        percent(figure["share_of_bandwidth"]) if work == "decode" else "",
                    ]
                )
        del engines
    return Report(
        f"Whole steps on {arguments.threads} thread(s), {'CPU' if arguments.cpu_time else 'wall-clock'} time; a sum "
        f"reads {bandwidth / 1e9:.1f} GB/s",
        ["model", "work", "program", ">tokens/s", ">spread", ">MB read a token", ">of bandwidth"],
        rows,
        {"memory_bytes_per_s": bandwidth, "measurements": figures},
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("models", nargs="*", default=["smollm2-135m"])
    options.add_argument("--batch", type=_numbers, default=[1, 16], help="Sequences that decode at once.")
    options.add_argument("--prefill", type=_numbers, default=[1024, 8184], help="Prompt lengths.")
    options.add_argument("--context", type=int, default=PROMPT_TOKENS, help="Prompt tokens of what decodes.")
    options.add_argument("--tokens", type=int, default=64, help="Tokens that each sequence generates.")
    options.add_argument("--kv-dtype", default="bf16")
    options.add_argument("--head", default="auto", help="Of the native program: auto, 16bit, int8.")
    options.add_argument("--activations", default="auto", help="Of the native program: auto, exact, int8.")
    options.add_argument("--programs", type=bench_report.names, default=list(PROGRAMS))
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--cpu-time", action="store_true")
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
