"""The server under the Azure conversation trace for a long time: what leaks, what grows, who is not answered.

100 connections; 5 % of the requests close theirs in the middle, 5 % are malformed. Lengths and rate are scaled to the
machine. RSS (server and engine together) is compared between the end of the warm-up and the end of the run: blocks of
the KV-cache become resident when they are first written, oneDNN's kernels when they are first needed.
"""

import argparse
import asyncio
import os
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import bench_report
import httpx
from bench_report import Report, ms, percent

from llmq.profiles.load.arrivals import Arrival, read_trace, replay
from llmq.profiles.load.client import LoadClient
from llmq.profiles.load.generator import random_prompt_ids
from llmq.profiles.load.metrics import RequestRecord, summarize

WARM_UP_SHARE = 0.2  # of a run that is too short for --warm-up-s
MALFORMED = (
    {"max_tokens": -1},
    {"temperature": 9},
    {"prompt": []},
    {"prompt": [-5]},
    {"no_such_field": 1},
    {"n": "two"},
)


@dataclass(frozen=True)
class Outcome:
    whole: list[RequestRecord]  # of requests that were to be answered
    left: list[RequestRecord]
    malformed: list[RequestRecord]
    rss_bytes: list[tuple[float, int]]  # (seconds since the start, bytes), once a second


def measure(arguments: argparse.Namespace) -> Report:
    from llmq.cli.local_server import serving
    from llmq.profiles.checkpoint import find_model, read_checkpoint

    folder = find_model(arguments.model)
    vocab_size = read_checkpoint(folder).architecture.vocab_size
    options = ["--kv-cache-memory", arguments.kv_cache_memory]
    options += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    with serving(folder, *options) as url:
        outcome = asyncio.run(load(url, scaled_trace(arguments), vocab_size, arguments))
        used_blocks = asyncio.run(blocks_after_rest(url))
    summary = summarize(outcome.whole)
    warm_up_s = min(arguments.warm_up_s, WARM_UP_SHARE * arguments.duration_s)
    warm = next(size for time_s, size in outcome.rss_bytes if time_s >= warm_up_s)
    end = outcome.rss_bytes[-1][1]
    figures = {
        "requests": len(outcome.whole) + len(outcome.left) + len(outcome.malformed),
        "answered": summary.num_answered,
        "errors": summary.errors,
        "left": len(outcome.left),
        "malformed": len(outcome.malformed),
        "malformed_not_refused": sum(one.error != "status 400" for one in outcome.malformed),
        "leaked_blocks": used_blocks,
        "rss_warm_bytes": warm,
        "rss_end_bytes": end,
        "rss_growth": end / warm - 1,
        "rss_bytes": outcome.rss_bytes[:: max(1, len(outcome.rss_bytes) // 60)],
        "output_tokens_per_s": summary.output_tokens_per_s,
        "ttft_p99_s": summary.ttft and summary.ttft.percentiles[99],
        "itl_p99_s": summary.itl and summary.itl.percentiles[99],
    }
    rows = [
        ["well-formed requests answered", f"{summary.num_answered} of {len(outcome.whole)}"],
        ["their errors", ", ".join(f"{count} × {error}" for error, count in summary.errors.items()) or "none"],
        ["left in the middle", len(outcome.left)],
        ["malformed and not refused with 400", f"{figures['malformed_not_refused']} of {len(outcome.malformed)}"],
        ["blocks held after all", used_blocks],
        [f"RSS after {warm_up_s:g} s, at the end", f"{warm / 2**20:.1f} MiB, {end / 2**20:.1f} MiB"],
        ["growth of RSS", percent(figures["rss_growth"])],
        ["output tokens/s", f"{summary.output_tokens_per_s:.1f}"],
        ["p99 TTFT, ITL", f"{ms(figures['ttft_p99_s'] or 0)}, {ms(figures['itl_p99_s'] or 0)}"],
    ]
    return Report(f"{arguments.duration_s:g} s on {arguments.model}", ["what", ">"], rows, figures)


def scaled_trace(arguments: argparse.Namespace) -> list[Arrival]:
    trace = read_trace(bench_report.trace_path("azure_llm_2023_conv.csv"))
    rate = len(trace) / trace[-1].time_s
    scale = arguments.length_scale
    return [
        replace(
            one,
            num_prompt_tokens=max(1, round(one.num_prompt_tokens * scale)),
            num_output_tokens=max(1, round(one.num_output_tokens * scale)),
        )
        for one in replay(trace, speed=arguments.rate / rate, duration_s=arguments.duration_s)
    ]


async def load(url: str, arrivals: list[Arrival], vocab_size: int, arguments: argparse.Namespace) -> Outcome:
    outcome = Outcome([], [], [], [])
    draw = random.Random(arguments.seed)
    watching = asyncio.create_task(_watch_rss(outcome.rss_bytes))
    loop = asyncio.get_running_loop()
    async with LoadClient(url, max_connections=arguments.connections) as client:
        model = (await _get(url, "/v1/models")).json()["data"][0]["id"]
        start_s = loop.time()
        tasks = []
        for number, one in enumerate(arrivals):
            body = {
                "model": model,
                "prompt": random_prompt_ids(number, one.num_prompt_tokens, vocab_size, first_id=3),
                "max_tokens": one.num_output_tokens,
                "ignore_eos": True,
            }
            kind, leave = outcome.whole, None
            chance = draw.random()
            if chance < arguments.malformed:
                kind, body = outcome.malformed, body | draw.choice(MALFORMED)
            elif chance < arguments.malformed + arguments.leaving:
                kind, leave = outcome.left, draw.randint(1, max(1, one.num_output_tokens // 2))
            due_s = start_s + one.time_s
            await asyncio.sleep(due_s - loop.time())
            tasks.append(asyncio.create_task(_ask(client, body, due_s, leave, kind)))
        await asyncio.gather(*tasks)
    outcome.rss_bytes.append((loop.time() - start_s, _rss_of_children_bytes()))
    watching.cancel()
    return outcome


async def _ask(client: LoadClient, body: dict, due_s: float, leave: int | None, kind: list[RequestRecord]) -> None:
    kind.append(await client.request("/v1/completions", body, scheduled_s=due_s, leave_after_events=leave))


async def blocks_after_rest(url: str) -> int:
    """KV blocks that requests hold a moment after the last one: more than 0 is a leak."""
    for _ in range(20):
        text = (await _get(url, "/metrics")).text
        used = int(float(re.search(r"^llmq_kv_blocks_used (\S+)$", text, re.MULTILINE)[1]))
        if used == 0:
            break
        await asyncio.sleep(0.25)
    return used


async def _get(url: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return (await http.get(path)).raise_for_status()


async def _watch_rss(samples: list[tuple[float, int]]) -> None:
    clock = asyncio.get_running_loop().time
    start_s = clock()
    while True:
        samples.append((clock() - start_s, _rss_of_children_bytes()))
        await asyncio.sleep(1)


def _rss_of_children_bytes() -> int:
    """Resident memory of all that this process has started: the server, and its engine."""
    total, pending = 0, [os.getpid()]
    while pending:
        pid = pending.pop()
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                pending.append(int(child))
                total += int(Path(f"/proc/{child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--threads", type=int, default=None)
    # Small, so that 3 % of RSS is not more than any leak.
    options.add_argument("--kv-cache-memory", default="256MiB")
    options.add_argument("--duration-s", type=float, default=1800)
    options.add_argument("--warm-up-s", type=float, default=300)
    options.add_argument("--rate", type=float, default=2.0, help="requests a second, on average (the trace: 5.5)")
    options.add_argument("--length-scale", type=float, default=0.0625, help="of the trace's lengths")
    options.add_argument("--connections", type=int, default=100)
    options.add_argument("--leaving", type=float, default=0.05)
    options.add_argument("--malformed", type=float, default=0.05)
    options.add_argument("--seed", type=int, default=0)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
