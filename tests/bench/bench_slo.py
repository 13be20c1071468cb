"""A sweep of rates past saturation, with and without `serve --slo`: who keeps the promise, and what it costs.

Simulated: the real Engine (scheduler, step policy, forecast) on a machine whose steps take what a known cost says, with
noise, on a clock of its own: the same figures on every run. With --model the real server under llmq's load generator,
a server of each kind for all its loads, which takes about six minutes. Loads are shares of the rate at which the server
without --slo answers requests that all come at once.
"""

import argparse
import asyncio
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from functools import partial

import bench_report
from bench_report import Report, ms, percent
from slo_simulation import MACHINES, Machine, simulate

from llmq.profiles.load.arrivals import Arrival, random_arrivals, read_trace, scaled
from llmq.profiles.load.measurement import Goodput
from llmq.profiles.load.metrics import RequestRecord, summarize
from llmq.profiles.load.pacing import ClosedLoop, OpenLoop
from llmq.profiles.slo import Slo

TPOT_FACTOR, TTFT_FACTOR = 4, 40  # of a token's time alone: the promise where --slo does not say
ALONE_REQUESTS, CROWD_REQUESTS = 4, 64
WARM_UP_REQUESTS = 4
MODEL_NAME = "bench"

Figures = dict[str, float]
Load = Callable[[float], Figures]  # requests a second -> what came of them


def measure(arguments: argparse.Namespace) -> Report:
    trace = read_trace(bench_report.trace_path("azure_llm_2023_conv.csv"))
    found = {f"{machine.name}, simulated": simulated(machine, trace, arguments) for machine in MACHINES}
    if arguments.model:
        found[f"{arguments.model}, measured"] = served(trace, arguments)
    rows = []
    for name, one in found.items():
        for point in one["loads"]:
            for way in ("without", "with"):
                is_first = point is one["loads"][0] and way == "without"
                load = f"{point['load']:g}" if way == "without" else ""
                rows.append([name if is_first else "", one["slo"] if is_first else "", load, way, *_cells(point[way])])
    return Report(
        "with and without --slo; loads as shares of what is answered when all come at once",
        [
            "run",
            "SLO",
            ">load",
            "--slo",
            ">TPOT p50",
            ">TPOT p99",
            ">TTFT p99",
            ">429",
            ">kept",
            ">goodput/s",
            ">tokens/s",
        ],
        rows,
        found,
        [
            "latencies are of the answered, kept: those of them within the SLO, goodput: those in a second; tokens/s: "
            "output tokens of goodput",
            "long prompts are the first that cannot be answered in time: those answered are shorter than those asked",
        ],
    )


def simulated(machine: Machine, trace: Sequence[Arrival], arguments: argparse.Namespace) -> dict:
    lengths = scaled(trace[: arguments.requests], machine.length_scale)
    crowd = random_arrivals(lengths, rate_per_s=math.inf)
    capacity = summarize(simulate(machine, crowd, None)).requests_per_s

    def load(promised: Slo | None, rate: float) -> Figures:
        return figures(simulate(machine, random_arrivals(lengths, rate_per_s=rate), promised), machine.slo)

    return sweep(machine.slo, capacity, arguments.loads, partial(load, None), partial(load, machine.slo))


def sweep(slo: Slo, capacity: float, loads: Sequence[float], without: Load, with_slo: Load) -> dict:
    """Each way's loads in a row: a server is started once for each."""
    ways = {
        "without": [without(load * capacity) for load in loads],
        "with": [with_slo(load * capacity) for load in loads],
    }
    points = [{"load": load, **{way: ways[way][index] for way in ways}} for index, load in enumerate(loads)]
    return {"slo": str(slo), "capacity_per_s": capacity, "loads": points}


def served(trace: Sequence[Arrival], arguments: argparse.Namespace) -> dict:
    from llmq.cli.local_server import serving
    from llmq.profiles.checkpoint import find_model

    folder = find_model(arguments.model)
    lengths = scaled(trace, arguments.length_scale)
    options = ["--served-model-name", MODEL_NAME, "--kv-cache-memory", arguments.kv_cache_memory]
    options += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    loads = arguments.server_loads

    with serving(folder, *options) as url:
        run = partial(_serve_load, url, lengths)
        alone = summarize(run(ClosedLoop(1), ALONE_REQUESTS))
        capacity = summarize(run(OpenLoop(math.inf), CROWD_REQUESTS)).requests_per_s
        token_s = alone.tpot.percentiles[50]
        wanted = arguments.slo or f"ttft={TTFT_FACTOR * token_s:.2f}s,tpot={TPOT_FACTOR * token_s * 1000:.0f}ms@p99"
        slo = Slo.parse(wanted)
        _say(f"{ms(token_s)} a token alone, {capacity:.2f} requests/s in a crowd; {slo}")
        without = [_point(run, load * capacity, slo, arguments.window_s) for load in loads]
    with serving(folder, *options, "--slo", wanted) as url:
        run = partial(_serve_load, url, lengths)
        kept = [_point(run, load * capacity, slo, arguments.window_s) for load in loads]
    points = [
        dict(zip(("load", "without", "with"), one, strict=True)) for one in zip(loads, without, kept, strict=True)
    ]
    return {"slo": str(slo), "capacity_per_s": capacity, "token_alone_s": token_s, "loads": points}


def _point(run: Callable, rate: float, slo: Slo, window_s: float) -> Figures:
    found = figures(run(OpenLoop(rate), max(CROWD_REQUESTS, round(rate * window_s)))[WARM_UP_REQUESTS:], slo)
    _say(f"{rate:.2f} requests/s: {found['goodput_per_s']:.2f} kept it, {percent(found['shed_share'])} got 429")
    return found


def _serve_load(url: str, lengths: Sequence[Arrival], pacing: OpenLoop | ClosedLoop, count: int) -> list[RequestRecord]:
    from llmq.profiles.load.client import LoadClient
    from llmq.profiles.load.measurement import Workload, cycled
    from llmq.profiles.load.measurement import measure as measured
    from llmq.profiles.load.target import probe

    async def run() -> list[RequestRecord]:
        async with LoadClient(url) as client:
            target = await probe(client, MODEL_NAME)
            workload = Workload(cycled(lengths, count), pacing)
            return list((await measured(client, target, workload, salt=secrets.token_hex(8))).records)

    return asyncio.run(run())


def figures(records: Sequence[RequestRecord], slo: Slo) -> Figures:
    """Latencies are of the answered, goodput of all that kept the SLO."""
    summary = summarize(records)
    good = [one for one in records if slo.is_met_by(one)]
    goodput = Goodput.of(good, summary.duration_s)
    num_shed = summary.errors.get("status 429", 0)
    return {
        "requests": len(records),
        "shed_share": num_shed / len(records),
        "other_errors": len(records) - summary.num_answered - num_shed,
        "tpot_p50_s": summary.tpot.percentiles[50] if summary.tpot else math.nan,
        "tpot_p99_s": summary.tpot.percentiles[99] if summary.tpot else math.nan,
        "ttft_p99_s": summary.ttft.percentiles[99] if summary.ttft else math.nan,
        "kept_of_answered": len(good) / max(1, summary.num_answered),
        "goodput_per_s": goodput.requests_per_s,
        "goodput_tokens_per_s": goodput.output_tokens_per_s,
        "answered_per_s": summary.requests_per_s,
    }


def _cells(one: Figures) -> list[str]:
    return [
        ms(one["tpot_p50_s"]),
        ms(one["tpot_p99_s"]),
        f"{one['ttft_p99_s']:.2f} s",
        percent(one["shed_share"]),
        percent(one["kept_of_answered"]),
        f"{one['goodput_per_s']:.2f}",
        f"{one['goodput_tokens_per_s']:.0f}",
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--requests", type=int, default=600, help="of a simulated load")
    options.add_argument("--loads", type=_numbers, default=[0.5, 0.8, 1.0, 1.5, 2.5], help="simulated")
    options.add_argument("--model", help="also the real server on this model, such as smollm2-135m")
    options.add_argument(
        "--slo", help="of the real server; default: 4 times a token's time alone, and 40 times for TTFT"
    )
    options.add_argument("--server-loads", type=_numbers, default=[0.7, 1.2, 2.0])
    options.add_argument("--window-s", type=float, default=40.0, help="in which a load's requests come")
    options.add_argument("--length-scale", type=float, default=0.125, help="of the trace, for the real server")
    options.add_argument("--kv-cache-memory", default="512MiB")
    options.add_argument("--threads", type=int)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
