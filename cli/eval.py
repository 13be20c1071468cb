"""`llmq eval`: perplexity, divergence from a baseline, and tasks, on the runtime that serves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from llmq.cli import console, engine_options
from llmq.cli.eval_options import EvalOptions, numerics_of
from llmq.cli.eval_tables import print_comparison
from llmq.cli.eval_tasks import TaskOptions, load_saved, parse_max_drop, parse_on_overlength, run_and_compare
from llmq.cli.eval_text import BUILTIN, TextOptions

if TYPE_CHECKING:
    from llmq.evals.served_subject import ServedSubject


class EvalGroup(TyperGroup):
    """`llmq eval compare A B`; anything else is a model to evaluate."""

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, args if args[:1] == ["compare"] else ["run", *args])

    def resolve_command(self, ctx, args):
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == "run" else name), command, rest


app = typer.Typer(cls=EvalGroup, add_completion=False)


@app.command("run")
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, alias, or the URL of a server.")],
    ppl: Annotated[str | None, typer.Option(help="Text file for perplexity, or builtin (the default).")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens scored together.  [default: 2048]")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between windows.  [default: window]")] = None,
    baseline: Annotated[str | None, typer.Option(help="Original model, or a saved RESULT.json of its tasks.")] = None,
    max_drop: Annotated[str | None, typer.Option(help="Most that scores may fall for a PASS: 1%.")] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks by name: arc_easy,hellaswag.")] = None,
    data: Annotated[Path | None, typer.Option(help="Your own JSONL: choices, answers, conversations or texts.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data of --tasks, instead of the hub.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First N items of a task, N windows of a text.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in a prompt.  [default: the task's]")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Tasks as conversations.")] = False,
    on_overlength: Annotated[
        str | None,
        typer.Option(help="Items longer than the model: error, skip or truncate (the default).", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), bf16, fp16 or fp32.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32, int8, fp8 or int4.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    kernels: Annotated[str, typer.Option(help="Of a CPU: auto, torch or native.")] = "auto",
    head: engine_options.Head = "auto",
    activations: engine_options.Activations = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.  [default: all cores]")] = None,
    tp: engine_options.TensorParallel = 1,
    pp: engine_options.PipelineParallel = 1,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="As serve has it.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Of a URL: folder of its tokenizer.", show_default=False)
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="LLMQ_API_KEY", help="Of a URL.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the JSON object here.")] = None,
) -> None:
    """Score a model on the runtime that serves it: perplexity, divergence from --baseline, lm-eval tasks, your own set.

    Without --ppl, --tasks and --data: perplexity of a built-in English text that no calibration of llmq uses.
    With --baseline and --max-drop the exit code is the verdict: 0 PASS, 1 FAIL, 3 not enough items to tell.
    Answers are kept as they come: after an interruption the same command goes on.
    llmq eval compare A B: the same verdict from two saved results (-o), baseline first.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the bars here are console's
    numerics = numerics_of(
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        kernels=kernels,
        head=head,
        activations=activations,
        threads=threads,
        batch_invariant=batch_invariant,
        tensor_parallel=tp,
        pipeline_parallel=pp,
    )
    margin = parse_max_drop(max_drop)
    asked = EvalOptions(
        *(model, ppl, window, stride, baseline, margin, tasks, data, data_dir, num_fewshot, apply_chat_template),
        *(on_overlength, tokenizer, numerics),
    )
    asked.check()
    from llmq.evals import result
    from llmq.profiles.checkpoint import find_model

    if output:
        result.check_output_path(output)
    saved = asked.saved_baseline
    saved_samples = load_saved(saved) if saved else None
    options = {
        "limit": limit,
        "num_fewshot": num_fewshot,
        "apply_chat_template": apply_chat_template,
        "on_overlength": parse_on_overlength(on_overlength),
    }
    items = TaskOptions(tasks, data, data_dir, numerics, options, output, margin) if asked.wants_tasks else None
    if items:
        items.check()
    text = TextOptions.read(ppl or BUILTIN, window, stride, limit) if asked.wants_text else None
    with console.progress() as progress:
        target = None if asked.is_remote else find_model(model, keep_blocks=True, progress=progress)
        other = asked.baseline_model
        baseline_folder = find_model(other, keep_blocks=True, progress=progress) if other else None
    for folder in (target, baseline_folder):
        if folder is not None:
            engine_options.check_ranks(folder, tp, pp)
    if items:
        items.load()

    record = result.new_record() | dict.fromkeys(("model", "baseline", "text", "tasks", "baseline_tasks", "comparison"))
    record["options"] = options | asdict(numerics)
    verdict = None
    with _served(model, tokenizer, api_key) if asked.is_remote else nullcontext(target) as target:
        if text:
            text.run(target, baseline_folder, numerics, record, is_quiet=as_json)
        if items:
            verdict = run_and_compare(items, target, baseline_folder, saved_samples, margin, record, is_quiet=as_json)
    if as_json:
        console.print_json(result.plain_json(record))
    if output:
        result.save_record(record, output)
        console.status(f"saved {output}")
    if items:
        items.forget_answers()
    if verdict is not None and verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


@contextmanager
def _served(url: str, tokenizer: Path | None, api_key: str | None) -> "Iterator[ServedSubject]":
    """What is served there, its connections closed at the end."""
    from llmq.evals.served_subject import ServedSubject

    subject = ServedSubject.open(url, tokenizer_folder=tokenizer, api_key=api_key)
    with subject.engine:
        yield subject


@app.command("compare")
def compare(
    baseline: Annotated[Path, typer.Argument(help="Saved result of the original: RESULT.json or .samples.jsonl.")],
    candidate: Annotated[Path, typer.Argument(help="Saved result of what may replace it.")],
    max_drop: Annotated[str | None, typer.Option(help="Most that scores may fall for a PASS: 1%.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two saved results item by item, whatever order they were answered in."""
    from llmq.evals.comparison import compare_samples

    margin = parse_max_drop(max_drop)
    comparison = compare_samples(load_saved(baseline), load_saved(candidate))
    if as_json:
        console.print_json(comparison.to_dict(margin))
        verdict = None if margin is None else comparison.overall.verdict(margin)
    else:
        verdict = print_comparison(comparison, margin)
    if verdict is not None and verdict.exit_code:
        raise typer.Exit(verdict.exit_code)
