"""`llmq plan`: the ways to serve a model that keep an SLO, and what their tokens cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.profiles.errors import InputError
from llmq.profiles.units import parse_tokens

if TYPE_CHECKING:
    from llmq.profiles.devices import Device
    from llmq.profiles.plan import Candidate

app = typer.Typer(add_completion=False)

_DEFAULT_GPUS = "h100,h200,l40s"
_FORMATS = ("bf16", "fp8", "int8", "w4")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Folder, config.json, .gguf file, hub id, or an alias.")],
    slo: Annotated[str, typer.Option(help="What each request shall keep: ttft=500ms,tpot=50ms@p99.")],
    lengths: Annotated[Path | None, typer.Option(help="A trace (.csv, .jsonl) whose lengths requests have.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Of each prompt, without --lengths.  [default: 1k]")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Of each answer, without it.  [default: 256]")] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"GPUs by name.  [default: {_DEFAULT_GPUS}; none with --measure]")
    ] = None,
    tp: Annotated[str | None, typer.Option(help="Tensor-parallel ranks: 1,2.  [default: 1,2,4,8]")] = None,
    weights: Annotated[
        str | None, typer.Option(help=f"Formats of weights.  [default: {','.join(_FORMATS)}, or as stored]")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="Of the KV-cache: bf16, fp16, fp8, int8, int4.")] = "bf16,fp8",
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Dollars an hour of one GPU, in place of the listed prices.")
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of a GPU that is used.")] = 0.9,
    devices: Annotated[Path | None, typer.Option(help="A devices.toml of your own; its rows come first.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table at most.")] = 15,
    measure: Annotated[
        bool, typer.Option("--measure", help="Quantize, load and prove the formats on this machine, too.")
    ] = False,
    max_drop: Annotated[
        str | None, typer.Option(help="Most that scores on --data or --tasks may fall, as llmq eval: 1%.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Of --measure: your own set, as llmq eval.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Of --measure: lm-eval tasks, as llmq eval.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of --measure: first N items.")] = None,
    duration: Annotated[float | None, typer.Option(min=1, help="Of --measure: seconds of each load.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Of --measure: requests of each load, instead.")] = None,
    max_rate: Annotated[float | None, typer.Option(help="Of --measure: where a sweep ends.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of --measure: CPU threads.")] = None,
    quantize_options: Annotated[
        str | None, typer.Option(help='Of --measure, where it calibrates: "--samples 32 --seq-len 256".')
    ] = None,
    work: Annotated[Path | None, typer.Option(help="Of --measure: where checkpoints and results are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Weights, KV dtypes, ranks and batches on each GPU: latencies as intervals, $ a million tokens, what fits, and
    whether the SLO is kept: PASS (the whole interval keeps it), MAYBE (a part), FAIL. Exit code of the best: 0, 3, 1.

    With --measure the formats are made on this machine, loaded by bench --sweep and compared by eval --baseline, and
    one is recommended: exit code 0, or 1 where none keeps the SLO and --max-drop, 3 where too few items or requests
    say it.
    """
    from llmq.cli.plan_measure import Measuring
    from llmq.cli.plan_text import as_dict, print_plan
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.checkpoint import find_model, read_config
    from llmq.profiles.plan import Lengths, predict
    from llmq.profiles.slo import Slo

    wanted = Slo.parse(slo)
    measuring = Measuring(
        model=model, slo=slo, lengths=lengths, max_drop=max_drop, data=data, tasks=tasks, limit=limit,
        duration=duration, requests=requests, max_rate=max_rate, threads=threads,
        quantize_options=quantize_options, work=work,
    )  # fmt: skip
    measuring.check(measure, weights)
    _check(lengths, prompt_tokens, output_tokens, gpu_memory_utilization)
    found_devices = _devices(gpu, devices, measure)
    with console.progress() as progress:
        path = find_model(model, config_only=not measure, keep_blocks=True, progress=progress)
    config = read_config(path)
    longest = ModelArchitecture.from_config(config).max_position_embeddings
    if lengths:
        from llmq.profiles.load.arrivals import read_trace

        asked = Lengths.of_trace(lengths.name, read_trace(lengths), wanted, longest)
    else:
        asked = Lengths.fixed(
            _tokens("--prompt-tokens", prompt_tokens, 1024), _tokens("--output-tokens", output_tokens, 256)
        )
        if asked.prompt + asked.output > longest:
            raise InputError(
                f"--prompt-tokens {asked.prompt} and --output-tokens {asked.output}: the model's own context is "
                f"{longest:,} tokens"
            )
    ways = _candidates(path, config, found_devices, weights, kv_dtype, tp, gpu_memory_utilization, price_per_hour)
    predictions = sorted((predict(way, asked, wanted) for way in ways), key=lambda one: one.order)
    result: dict[str, Any] = {
        "model": model,
        "slo": str(wanted),
        "lengths": {"source": asked.source, "prompt_tokens": asked.prompt, "output_tokens": asked.output},
        "candidates": [as_dict(one) for one in predictions],
    }
    if predictions and not as_json:
        print_plan(model, predictions, asked, wanted, top)
    if measure:
        code = measuring.run(asked, weights, result, is_quiet=as_json)
    else:
        code = predictions[0].outlook.exit_code if predictions else 1
    if as_json:
        console.print_json(result)
    raise typer.Exit(code)


def _check(lengths: Path | None, prompt: str | None, output: str | None, share: float) -> None:
    if lengths and (prompt or output):
        raise InputError("--lengths brings the lengths: leave --prompt-tokens and --output-tokens away")
    if not 0 < share <= 1:
        raise InputError(f"--gpu-memory-utilization {share}: a share above 0 and up to 1")


def _tokens(flag: str, text: str | None, default: int) -> int:
    try:
        return parse_tokens(text) if text else default
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None


def _devices(gpu: str | None, own: Path | None, measure: bool) -> "list[Device]":
    from llmq.profiles.devices import find_device

    if own is not None and gpu is None:
        raise InputError("--devices names GPUs: give the names with it, as --gpu h100,h200")
    names = gpu if gpu is not None else "" if measure else _DEFAULT_GPUS
    return [find_device(name.strip(), own) for name in names.split(",") if name.strip()]


def _ranks(asked: str | None, valid: list[int]) -> list[int]:
    """`--tp`, or the powers of two up to 8 that a model can be split into. Raises InputError for one that it cannot."""
    if asked is None:
        return [number for number in (1, 2, 4, 8) if number in valid]
    ranks = [int(one) if one.strip().isdigit() else 0 for one in asked.split(",")]
    if wrong := [one for one in ranks if one not in valid]:
        raise InputError(f"--tp {asked}: {wrong[0] or 'not a number'}; one of {', '.join(map(str, valid))}")
    return ranks


def _candidates(
    path: Path,
    config: dict[str, Any],
    devices: "list[Device]",
    weights: str | None,
    kv_dtype: str,
    tp: str | None,
    share: float,
    price: float | None,
) -> "list[Candidate]":
    from llmq.cli.engine_options import valid_ranks
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.checkpoint import read_quantization
    from llmq.profiles.kv_spec import KV_DTYPES
    from llmq.profiles.plan import candidates
    from llmq.profiles.weight_size import weight_size
    from llmq.profiles.weight_storage import declared_storage

    if not devices:
        return []
    quantization = read_quantization(path, config)
    if weights is None and quantization is not None:
        storage = declared_storage(quantization)
        sizes = {storage.name if storage else "as stored": weight_size(path)}
    elif weights is None:
        sizes = {one: weight_size(path, one) for one in _FORMATS}
    else:
        sizes = {one.strip(): weight_size(path, one.strip()) for one in weights.split(",")}
    kinds = [one.strip() for one in kv_dtype.split(",")]
    if unknown := [one for one in kinds if one not in KV_DTYPES]:
        raise InputError(f"--kv-dtype {unknown[0]}: one of {', '.join(KV_DTYPES)}")
    # Of each format its own: a rank's part of a quantized weight ends with a group.
    architecture, stored = ModelArchitecture.from_config(config), weights is None and quantization is not None
    ranks = {
        name: _ranks(tp, valid_ranks(architecture, config, quantization, None if stored else name)) for name in sizes
    }
    return candidates(
        config,
        devices,
        weight_bytes={name: size.num_bytes for name, size in sizes.items()},
        kv_dtypes=kinds,
        ranks=ranks,
        memory_share=share,
        price_per_hour=price,
    )
