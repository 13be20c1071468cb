"""KV waste and concurrent requests: paging against reserving, on the lengths of the Azure conversation trace.

No model: the lengths run through Scheduler and KVCacheManager, all queued at once. Waste is the share of the token
slots that requests hold and have no token in, averaged over the steps in which others wait.
"""

import argparse
from collections.abc import Callable
from statistics import mean

import bench_report
from bench_report import Report, percent
from bench_simulation import SimulatedEngine

from llmq.profiles.load.arrivals import Arrival, read_trace
from llmq.runtime.policy import StepPolicy


def measure(arguments: argparse.Namespace) -> Report:
    trace = read_trace(bench_report.trace_path("azure_llm_2023_conv.csv"))
    longest = arguments.max_model_len
    fitting = [one for one in trace if one.num_prompt_tokens + one.num_output_tokens <= longest]
    lengths = fitting[: arguments.requests]
    capacity = arguments.capacity_tokens
    ways = {
        "paged": paged(lengths, arguments),
        "reserve the maximum": reserved(lengths, capacity, lambda one: longest),
        "reserve the next power of two": reserved(lengths, capacity, _power_of_two),
        "reserve what will be used (oracle)": reserved(lengths, capacity, _total),
    }
    base = ways["reserve the maximum"]["concurrent"]
    rows = [
        [name, percent(way["waste"]), f"{way['concurrent']:.1f}", f"{way['concurrent'] / base:.2f}×"]
        for name, way in ways.items()
    ]
    skipped = sum(one.num_prompt_tokens + one.num_output_tokens > longest for one in trace)
    return Report(
        f"{len(lengths)} requests in {capacity} token slots, at most {longest} tokens each",
        ["KV-cache", ">waste", ">concurrent requests", ">against the maximum"],
        rows,
        {"ways": ways, "requests": len(lengths), "capacity_tokens": capacity, "max_model_len": longest},
        [
            f"requests of more than {longest} tokens are left out: {skipped} of {len(trace)}",
            f"paged: {ways['paged']['preemptions']} preemptions",
        ],
    )


def paged(lengths: list[Arrival], arguments: argparse.Namespace) -> dict[str, float]:
    num_blocks = arguments.capacity_tokens // arguments.block_tokens
    engine = SimulatedEngine(
        StepPolicy(max_num_seqs=len(lengths), max_num_batched_tokens=arguments.max_num_batched_tokens),
        num_blocks=num_blocks,
        block_tokens=arguments.block_tokens,
        max_model_len=arguments.max_model_len,
    )
    engine.add_all(lengths)
    wastes, running = [], []
    while engine.scheduler.has_requests:
        plan, _ = engine.step()
        if engine.scheduler.waiting:
            # Held after the step's allocation; tokens as computed by the step. What ended gave its blocks back.
            alive = {request.request_id: request for request in engine.scheduler.running}
            used = sum(
                item.num_computed_tokens + item.num_scheduled_tokens
                for item in plan.scheduled
                if item.request_id in alive
            )
            used += sum(
                request.num_computed_tokens
                for name, request in alive.items()
                if name not in {item.request_id for item in plan.scheduled}
            )
            held = (num_blocks - engine.kv.pool.num_free_blocks) * arguments.block_tokens
            if held:
                wastes.append(1 - used / held)
            running.append(len(alive))
    return {
        "waste": mean(wastes),
        "concurrent": mean(running),
        "preemptions": engine.scheduler.num_preemptions,
    }


def reserved(lengths: list[Arrival], capacity: int, reserve: Callable[[Arrival], int]) -> dict[str, float]:
    """Each request holds `reserve(request)` slots from admission to its end; first come, first served."""
    waiting = list(reversed(lengths))
    running: list[list] = []  # [slots, tokens now, tokens at the end]
    wastes, counts = [], []
    while waiting or running:
        while waiting and sum(one[0] for one in running) + reserve(waiting[-1]) <= capacity:
            one = waiting.pop()
            running.append([reserve(one), one.num_prompt_tokens, _total(one)])
        if waiting:
            held = sum(one[0] for one in running)
            wastes.append(1 - sum(one[1] for one in running) / held)
            counts.append(len(running))
        for one in running:
            one[1] += 1
        running = [one for one in running if one[1] < one[2]]
    return {"waste": mean(wastes), "concurrent": mean(counts)}


def _total(one: Arrival) -> int:
    return one.num_prompt_tokens + one.num_output_tokens


def _power_of_two(one: Arrival) -> int:
    """Orca's "Pow2": the prompt, and the output rounded up to a power of two."""
    return one.num_prompt_tokens + 2 ** (one.num_output_tokens - 1).bit_length()


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--requests", type=int, default=2000)
    options.add_argument("--capacity-tokens", type=int, default=131_072)
    options.add_argument("--block-tokens", type=int, default=16)
    options.add_argument("--max-model-len", type=int, default=4096)
    options.add_argument("--max-num-batched-tokens", type=int, default=2048)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
