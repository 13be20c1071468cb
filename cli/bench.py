"""`llmq bench`: load on any OpenAI-shaped server, measured."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.cli.served_target import is_url, model_name, server_of
from llmq.profiles.errors import FailedError, InputError

if TYPE_CHECKING:
    from llmq.cli.bench_output import Result
    from llmq.cli.bench_plan import BenchPlan
    from llmq.profiles.load.client import LoadClient
    from llmq.profiles.load.measurement import Measurement
    from llmq.profiles.load.target import Target
    from llmq.profiles.load.utilization import Utilization

app = typer.Typer(add_completion=False)

_INTERRUPTED = 130  # as a shell has it: 128 and the number of SIGINT
_ENDPOINTS = {"completions": ("/v1/completions",), "chat": ("/v1/chat/completions",)}


@app.command()
def bench(
    target: Annotated[
        str, typer.Argument(help="The URL of a server, or a model to serve here (folder, .gguf file, hub id, alias).")
    ],
    model: Annotated[str | None, typer.Option(help="Which model of a URL. Default: its first.")] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Open loop: requests a second on average; inf: all at once. Default: 1.", show_default=False),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(help="Of --rate's gaps (gamma): 1 is Poisson, less comes in bursts.  [default: 1]"),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many users, each waiting for its answer.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Lengths, and without --rate or --concurrency times too: Azure's CSV, Mooncake's JSON lines, or a CSV "
            "of arrival_s, prompt_tokens, output_tokens."
        ),
    ] = None,
    speed: Annotated[float | None, typer.Option(help="Of a trace's own times.  [default: 1]")] = None,
    length_scale: Annotated[float | None, typer.Option(help="Of a trace's lengths.  [default: 1]")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Of each prompt.  [default: 256]")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Of each answer.  [default: 64]")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests that are measured. Default: 100, or what --duration makes.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds in which they come, of an open loop.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Requests sent before them and not counted. Default: a tenth, at least 1.")
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="ttft=500ms,tpot=50ms@p99: goodput is what keeps all; the exit code says whether."),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Find the highest rate that keeps --slo.")] = False,
    max_rate: Annotated[float, typer.Option(min=0.001, help="Where a sweep ends.")] = 1000.0,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Dollars an hour of the machine: $ a million tokens at goodput.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="What the server runs on, by name (h100): MFU is a share of its peak.")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="How many of them.  [default: 1]", show_default=False)] = None,
    facts: Annotated[
        str | None, typer.Option(help="A model or config.json whose FLOPs MFU counts. Default: TARGET, if a model.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="completions or chat. Default: the first that answers.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model whose tokenizer counts, for a server that sends no usage.")
    ] = None,
    body: Annotated[str | None, typer.Option(help='JSON put into each request: {"temperature": 0}.')] = None,
    api_key: Annotated[str | None, typer.Option(envvar="LLMQ_API_KEY", help="Of a URL.", show_default=False)] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds without a byte, then an error.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the arrival times. Prompts are new in every run.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a model served here.")] = None,
    serve_options: Annotated[
        str | None, typer.Option(help='Of a model served here, as for llmq serve: "--kv-dtype int8".')
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    csv_output: Annotated[Path | None, typer.Option("--csv", help="Write a row for each request.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Load a server and measure it: TTFT, TPOT, ITL, E2E with percentiles, throughput, goodput, $ a million tokens.

    Latency counts from when a request was due, tokens are those of the server's usage, the warm-up is not counted.

    Ctrl-C ends it and shows what was measured until then (exit code 130).
    Exit code with --slo: 0 it is kept (of a sweep: at the rate found), 1 it is not, 3 all is well in too few requests
    to say (100 for p99).
    """
    from llmq.cli import bench_output
    from llmq.cli.bench_plan import BenchPlan

    _check_target_options(target, model, {"--threads": threads, "--serve-options": serve_options})
    if endpoint is not None and endpoint not in _ENDPOINTS:
        raise InputError(f"--endpoint {endpoint}: one of {', '.join(_ENDPOINTS)}")
    plan = BenchPlan(
        rate=rate, burstiness=burstiness, concurrency=concurrency, trace=trace, speed=speed,
        length_scale=length_scale, prompt_tokens=prompt_tokens, output_tokens=output_tokens, requests=requests,
        duration=duration, warmup=warmup, slo_text=slo, sweep=sweep, max_rate=max_rate, seed=seed,
    )  # fmt: skip
    plan.check()
    extra_body = _json_object("--body", body)
    bench_output.check_writable(csv_output, html)
    utilization = _utilization(target, gpu, tp, facts)
    count_tokens = None if tokenizer is None else _token_counter(tokenizer)
    with server_of(target, _words(threads, serve_options), loading="llmq bench") as url:
        name = model_name(url, model, api_key)

        async def run() -> tuple["Target", list["Measurement"], float | None, bool]:
            from llmq.profiles.load.client import LoadClient
            from llmq.profiles.load.target import COMMON_IDS, probe

            async with LoadClient(url, api_key=api_key, timeout_s=timeout, count_tokens=count_tokens) as client:
                paths = _ENDPOINTS.get(endpoint, tuple(path for (path,) in _ENDPOINTS.values()))
                found = await probe(
                    client, name, paths=paths, token_ids=_vocabulary(target) or COMMON_IDS, extra_body=extra_body
                )
                console.status(bench_output.target_line(url, found))
                return found, *await _run(client, found, plan)

        found, measurements, best_rate, is_cut = asyncio.run(run())
    if is_cut and not any(one.summary.num_answered for one in measurements):
        raise KeyboardInterrupt
    if not any(one.summary.num_answered for one in measurements):
        raise FailedError(bench_output.nothing_answered(measurements[-1]))
    result = bench_output.Result(target, found, measurements, plan.sweep, best_rate, price_per_hour, utilization)
    bench_output.write_csv(result, csv_output)
    bench_output.write_page(result, html)
    bench_output.show(result, as_json=as_json)
    raise typer.Exit(_INTERRUPTED if is_cut else _exit_code(result))


def _exit_code(result: "Result") -> int:
    from llmq.profiles.slo import Verdict

    if result.sweeps and result.best_rate is None:
        return 1
    return {None: 0, Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.NOT_ENOUGH: 3}[result.shown.verdict]


async def _run(
    client: "LoadClient", target: "Target", plan: "BenchPlan"
) -> tuple[list["Measurement"], float | None, bool]:
    """All measurements in the order in which they were made, the highest rate that a sweep found, and whether Ctrl-C
    ended them: then the last is of what was answered until then."""
    import secrets

    from llmq.cli import bench_output
    from llmq.profiles.load.measurement import measure
    from llmq.profiles.load.sweep import highest_rate
    from llmq.profiles.slo import Verdict

    measurements: list[Measurement] = []

    async def measured(rate: float | None) -> "Measurement":
        workload = plan.workload(rate)
        console.status(bench_output.workload_line(workload))
        with console.progress() as progress:
            one = await measure(
                client, target, workload, salt=secrets.token_hex(8), slo=plan.slo, on_done=_counter(progress, workload)
            )
        measurements.append(one)
        return one

    if not plan.sweep:
        return measurements, None, (await measured(None)).num_cut > 0

    borne: list[float] = []

    async def bears(rate: float) -> bool:
        one = await measured(rate)
        if one.num_cut:
            raise _CutError
        console.status(bench_output.point_line(one))
        is_borne = one.verdict is not Verdict.FAIL and not one.is_saturated
        if is_borne:
            borne.append(rate)
        return is_borne

    try:
        return measurements, await highest_rate(bears, start=plan.start_rate, most=plan.max_rate), False
    except _CutError:
        if not measurements[-1].measured:
            measurements.pop()
        return measurements, max(borne, default=None), True


class _CutError(Exception):
    """A sweep was interrupted in one of its rates."""


def _counter(progress: Any, workload: Any) -> Callable[[Any], None]:
    done = 0

    def count(_: Any) -> None:
        nonlocal done
        done += 1
        progress("requests", done, len(workload.lengths))

    return count


def _check_target_options(target: str, model: str | None, of_served: dict[str, Any]) -> None:
    given = [flag for flag, value in of_served.items() if value is not None]
    if given and is_url(target):
        raise InputError(f"{given[0]} is of a model served here, and {target} is a server already: leave it away")
    if model is not None and not is_url(target):
        raise InputError(
            f"--model {model} is one of a server's models, and {target} is to be served here: "
            f"name the model alone, llmq bench {model}, or a server's URL"
        )


def _utilization(target: str, gpu: str | None, tp: int | None, facts: str | None) -> "Utilization | None":
    if gpu is None:
        if facts is not None or tp is not None:
            raise InputError(
                f"{'--facts' if tp is None else '--tp'} is for MFU, a share of the peak of a --gpu: name it"
            )
        return None
    if facts is None and is_url(target):
        raise InputError(f"--gpu {gpu}: a server does not tell what its model computes: give --facts MODEL too")
    from llmq.cli.profile_facts import datasheet, decoder_work
    from llmq.profiles.checkpoint import find_model
    from llmq.profiles.load.utilization import Utilization

    machine = datasheet(gpu)
    with console.progress() as progress:
        path = find_model(facts or target, config_only=True, keep_blocks=True, progress=progress)
    return Utilization(decoder_work(path, tp=tp or 1)[0], machine)


def _words(threads: int | None, serve_options: str | None) -> list[str]:
    import shlex

    return ([] if threads is None else ["--threads", str(threads)]) + shlex.split(serve_options or "")


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InputError(f"{flag} {text}: no JSON ({error})") from None
    if not isinstance(found, dict):
        raise InputError(f"{flag} {text}: must be a JSON object of a request's fields")
    return found


def _token_counter(name: str) -> Callable[[str], int]:
    from llmq.profiles.checkpoint import find_model
    from llmq.runtime.frontend.tokenizer import Tokenizer

    with console.progress() as progress:
        tokenizer = Tokenizer.from_folder(find_model(name, progress=progress))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _vocabulary(target: str) -> Any:
    """All ids of a model served here but the first few, where special tokens are; None for a URL."""
    if is_url(target):
        return None
    from llmq.profiles.checkpoint import find_model, read_checkpoint
    from llmq.profiles.load.prompts import TokenIdPrompts

    size = read_checkpoint(find_model(target, keep_blocks=True)).architecture.vocab_size
    return TokenIdPrompts(vocab_size=size, first_id=min(100, size // 4))
