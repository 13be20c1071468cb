"""Decode at long contexts: what a step takes as K and V grow, beside what memory gives.

Whole steps of the native program for one sequence, whose K and V are random numbers in the store: nothing is prefilled,
and the model's own limit does not count, since a step's cost does not depend on what the numbers are. Contexts take
turns. The growth of a step from the shortest context to each other, over the K and V bytes that it reads more, is a
rate; its share is of what this machine's memory gives a plain sum by as many threads.

    python tests/bench/bench_long_context.py smol-4bit --kv-dtype int8 --threads 2
"""

import argparse
import time
from statistics import median

import bench_report
import torch
from bench_decode import Clock, memory_bandwidth
from bench_report import Report, percent

from llmq.profiles.checkpoint import find_model
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.config import EngineConfig
from llmq.runtime.kv_store import KVStore, Slots
from llmq.runtime.memory import rank_layout
from llmq.runtime.programs.base import Program
from llmq.runtime.programs.choice import make_program
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import NewRequest, ScheduledRequest
from llmq.runtime.worker import Worker

BLOCK_TOKENS = 16
_WRITTEN_AT_ONCE = 4096


def filled_store(layout: KVCacheLayout, longest: int) -> KVStore:
    """Blocks of one sequence of `longest` tokens, K and V normally distributed."""
    store = KVStore(layout, layout.blocks_for(longest), torch.device("cpu"), in_tiles=True)
    generator = torch.Generator().manual_seed(0)
    for group in layout.groups:
        shape = (_WRITTEN_AT_ONCE, group.spec.num_kv_heads, group.spec.head_dim_k)
        keys, values = torch.randn(2, *shape, generator=generator).to(torch.bfloat16)
        for layer in group.layers:
            for first in range(0, longest, _WRITTEN_AT_ONCE):
                count = min(_WRITTEN_AT_ONCE, longest - first)
                slots = Slots.of(torch.arange(first, first + count), BLOCK_TOKENS)
                store.write(layer, keys[:count], values[:count], slots)
    return store


def step_of(store: KVStore, context: int) -> BatchInputs:
    """One token behind `context - 1` others."""
    new = NewRequest(
        request_id="0",
        token_ids=[5] * context,
        num_prompt_tokens=context,
        sampling_params=SamplingParams(),
        score_prompt=False,
    )
    request = RunnerRequest(new, len(store.layout.groups))
    for blocks, group in zip(request.block_ids, store.layout.groups, strict=True):
        blocks += range(-(-context // group.block_tokens))
    item = ScheduledRequest(request_id="0", num_computed_tokens=context - 1, num_scheduled_tokens=1, samples=True)
    return BatchInputs.build([item], [request], store.layout, store.staging)


def step_seconds(program: Program, inputs: BatchInputs, clock: Clock) -> float:
    start = clock()
    program.logits(program.forward(inputs))
    return clock() - start


def measure(arguments: argparse.Namespace) -> Report:
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    bandwidth = memory_bandwidth(clock)
    longest = max(arguments.contexts)
    config = EngineConfig(
        model=str(find_model(arguments.model)), dtype="bf16", kv_dtype=arguments.kv_dtype, threads=arguments.threads
    )
    worker = Worker(config)
    store = filled_store(rank_layout(worker.architecture, config, worker.dtypes), longest)
    group_size = worker.architecture.num_attention_heads // worker.architecture.num_kv_heads
    program = make_program(worker.loader.load(longest), store, torch.bfloat16, group_size)
    steps = {context: step_of(store, context) for context in sorted(arguments.contexts)}
    times: dict[int, list[float]] = {context: [] for context in steps}
    for _ in range(arguments.turns):
        for context, inputs in steps.items():
            times[context].append(min(step_seconds(program, inputs, clock) for _ in range(arguments.steps)))
    return _report(arguments, program.name, bandwidth, times, store)


def _report(
    arguments: argparse.Namespace, program: str, bandwidth: float, times: dict[int, list[float]], store: KVStore
) -> Report:
    shortest, figures, rows = min(times), [], []
    for context, taken in times.items():
        kv_bytes = sum(group.bytes_per_token * context for group in store.layout.groups)
        figure = {"context": context, "kv_bytes": kv_bytes, "step_s": median(taken), "times_s": taken}
        if context > shortest:
            more_s = median(taken) - median(times[shortest])
            rate = (kv_bytes - figures[0]["kv_bytes"]) / more_s
            figure |= {"bytes_per_s": rate, "share_of_bandwidth": rate / bandwidth}
        figures.append(figure)
        rows.append(
            [
                f"{context:,}",
                f"{kv_bytes / 1e6:,.1f}",
                f"{1e3 * median(taken):.2f}",
                percent(max(taken) / min(taken) - 1),
                f"{figure['bytes_per_s'] / 1e9:.1f}" if context > shortest else "",
                percent(figure["share_of_bandwidth"]) if context > shortest else "",
            ]
        )
    return Report(
        f"A decode step ({program}, K and V in {arguments.kv_dtype}) on {arguments.threads} thread(s), "
        f"{'CPU' if arguments.cpu_time else 'wall-clock'} time; a sum reads {bandwidth / 1e9:.1f} GB/s",
        [">context", ">K and V, MB", ">step, ms", ">spread", ">growth, GB/s", ">of bandwidth"],
        rows,
        {"memory_bytes_per_s": bandwidth, "program": program, "measurements": figures},
    )


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("model", nargs="?", default="smollm2-135m")
    options.add_argument("--contexts", type=bench_report.whole_numbers, default=[1024, 8192, 16384, 32768])
    options.add_argument("--kv-dtype", default="int8")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--turns", type=int, default=7)
    options.add_argument("--steps", type=int, default=3, help="Of a turn, of which the fastest counts.")
    options.add_argument("--cpu-time", action="store_true")
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
