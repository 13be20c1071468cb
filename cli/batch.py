"""`llmq batch`: a file of requests through the engine at full batch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.cli import engine_options as options
from llmq.profiles.errors import InputError
from llmq.profiles.units import format_count

if TYPE_CHECKING:
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.offline.batch_file import BatchFile
    from llmq.runtime.offline.batch_job import BatchTotals
    from llmq.runtime.offline.batch_output import BatchOutput

app = typer.Typer(add_completion=False)


@app.command()
def batch(
    file: Annotated[Path, typer.Argument(help="JSON lines: custom_id, method, url, body, as OpenAI's batch API.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Results, a line each; begun ones are gone on with.")],
    model: Annotated[
        str | None, typer.Option(help="Folder, .gguf file, hub id or alias. Default: the one that all bodies name.")
    ] = None,
    served_model_name: options.ServedModelName = None,
    seed: Annotated[int, typer.Option(help="Of requests that bring none, together with their custom_id.")] = 0,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = "auto",
    kv_cache_memory: options.KvCacheMemory = None,
    max_model_len: options.MaxModelLen = "auto",
    max_num_seqs: options.MaxNumSeqs = 128,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 1024,
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    head: options.Head = "auto",
    activations: options.Activations = "auto",
    threads: options.Threads = None,
    tp: options.TensorParallel = 1,
    pp: options.PipelineParallel = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Answer a batch: /v1/chat/completions and /v1/completions, bodies as `llmq serve` takes them.

    Results are appended as they come and synced in groups. After any end, kill -9 too, the same command computes only
    what is missing; another input or model is refused. Results come in the order in which they are ready.

    Exit code 0: every request was answered; 1: some were refused or failed (their results say why); 2: nothing ran.
    """
    import msgspec

    from llmq.profiles.checkpoint import find_model
    from llmq.runtime.offline.batch_file import BatchFile
    from llmq.runtime.offline.batch_job import BatchTotals
    from llmq.runtime.offline.batch_output import BatchOutput, model_identity

    config = options.engine_config(
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        kernels=kernels,
        head=head,
        activations=activations,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=threads,
        tensor_parallel=tp,
        pipeline_parallel=pp,
    )
    requests = BatchFile.index(file)
    name, served_name = _model_names(requests, model, served_model_name)
    with console.progress() as progress:
        folder = find_model(name, keep_blocks=True, progress=progress)
    options.check_ranks(folder, tp, pp)
    config = msgspec.structs.replace(config, model=str(folder))
    # What decides a result. How many run at once does not.
    job = {
        "input": requests.sha256,
        "model": model_identity(folder),
        "name of the model": served_name,
        "seed": seed,
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "max_model_len": config.max_model_len,
    }
    with BatchOutput(output, job) as results:
        found = len(results.statuses)
        totals = BatchTotals()
        if found < len(requests.lines):
            totals = _run(requests, results, config, served_name, seed)
        summary = _summary(requests, results, totals, found)
    _print(summary, output, as_json=json_output)
    raise typer.Exit(1 if summary["failed"] else 0)


def _model_names(requests: "BatchFile", model: str | None, served_name: str | None) -> tuple[str, str]:
    """(the model to find, what bodies call it). Raises InputError where that is not clear, or no body names it."""
    from llmq.cli.serve import default_name

    asked = sorted({line.model for line in requests.lines if line.model is not None})
    if model is None:
        if len(asked) != 1:
            named = ", ".join(asked[:5]) or "none"
            raise InputError(f"{requests.path}: bodies name these models: {named}. Say which to load with --model")
        return asked[0], served_name or asked[0]
    name = served_name or default_name(model)
    if asked and name not in asked:
        raise InputError(
            f"{requests.path}: no body asks for the model {name!r}; they ask for {', '.join(asked[:5])}. "
            f"With --served-model-name {asked[0]} this model answers to that name"
        )
    return model, name


def _run(
    requests: "BatchFile", results: "BatchOutput", config: "EngineConfig", served_name: str, seed: int
) -> "BatchTotals":
    from llmq.runtime.engine import Engine
    from llmq.runtime.frontend.tokenizer import Tokenizer
    from llmq.runtime.offline.batch_job import BatchJob

    found, total = len(results.statuses), len(requests.lines)
    requested = format_count(total, "request")
    missing = f"{total - found} of {requested}, {found} there already" if found else requested
    console.status(f"llmq batch: {missing} · {config.model} → {results.path}")
    engine = Engine.from_config(config)
    with console.progress() as progress:
        job = BatchJob(
            engine,
            Tokenizer.from_folder(config.model),
            model_name=served_name,
            max_num_seqs=config.max_num_seqs,
            seed=seed,
            progress=progress,
        )
        return job.run(requests, results)


def _summary(requests: "BatchFile", results: "BatchOutput", totals: "BatchTotals", found: int) -> dict[str, Any]:
    failed = sum(status != 200 for status in results.statuses.values())
    duration_s = totals.duration_s
    return {
        "requests": len(requests.lines),
        "answered": len(results.statuses) - failed,
        "failed": failed,
        "found": found,
        "computed": totals.num_answered + totals.num_failed,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.completion_tokens,
        "duration_s": duration_s,
        "completion_tokens_per_s": totals.completion_tokens / duration_s if duration_s else None,
        "output": str(results.path),
    }


def _print(summary: dict[str, Any], output: Path, *, as_json: bool) -> None:
    if as_json:
        console.print_json(summary)
        return
    parts = [f"{summary['answered']} of {format_count(summary['requests'], 'request')} answered"]
    if summary["failed"]:
        parts.append(f"{summary['failed']} refused or failed")
    if summary["found"]:
        parts.append(f"{summary['found']} there already")
    if summary["computed"]:
        parts.append(
            f"{format_count(summary['prompt_tokens'], 'prompt token')} ({summary['cached_tokens']} cached), "
            f"{summary['completion_tokens']} generated in {console.format_duration(summary['duration_s'])}"
        )
    if summary["completion_tokens_per_s"]:
        parts.append(f"{summary['completion_tokens_per_s']:.0f} tokens/s")
    console.print_text(" · ".join([*parts, str(output)]))
