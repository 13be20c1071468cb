"""`llmq eval`: perplexity, divergence from a baseline, and tasks, on the runtime that serves."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from llmq.cli import console
from llmq.cli.engine_options import check_device, check_kernels
from llmq.cli.eval_tables import print_comparison, print_text_evaluation
from llmq.cli.eval_tasks import (
    TaskOptions,
    load_saved,
    numerics_line,
    parse_max_drop,
    parse_on_overlength,
    run_and_compare,
)
from llmq.profiles.errors import InputError

if TYPE_CHECKING:
    from llmq.evals.evaluation import Subject, TextEvaluation
    from llmq.evals.numerics import Numerics

BUILTIN = "builtin"


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
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.  [default: all cores]")] = None,
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
    numerics = _numerics(dtype, kv_dtype, device, kernels, threads, batch_invariant)
    remote = is_url(model)
    if remote:
        _check_served(model, tasks or data, ppl, numerics)
    elif tokenizer:
        raise InputError(f"--tokenizer {tokenizer} is for the URL of a server: {model} brings its own")
    wants_tasks, wants_text = bool(tasks or data), bool(ppl or (baseline and not remote) or not (tasks or data))
    if not wants_tasks and (num_fewshot is not None or apply_chat_template or on_overlength):
        raise InputError(
            "--num-fewshot, --apply-chat-template and --on-overlength are about tasks: give --tasks or --data with them"
        )
    if data_dir and not tasks:
        raise InputError(f"--data-dir {data_dir} holds the data of lm-eval's tasks: name them with --tasks")
    if not wants_text and (window is not None or stride is not None):
        raise InputError("--window and --stride are about a text: give --ppl with them")
    if baseline and is_url(baseline):
        raise InputError(f"--baseline {baseline}: evaluate it by itself with -o, and give its RESULT.json")
    margin = parse_max_drop(max_drop)
    if margin is not None and not (wants_tasks and baseline):
        raise InputError("--max-drop is about items that two models answer: give --baseline and --tasks or --data")
    from llmq.evals import result
    from llmq.profiles.checkpoint import find_model

    if output:
        result.check_output_path(output)
    saved = Path(baseline) if baseline and baseline.endswith(".json") else None
    if saved and not wants_tasks:
        raise InputError(f"--baseline {saved} is a saved result, which has items to compare: give --tasks or --data")
    saved_samples = load_saved(saved) if saved else None
    options = {
        "limit": limit,
        "num_fewshot": num_fewshot,
        "apply_chat_template": apply_chat_template,
        "on_overlength": parse_on_overlength(on_overlength),
    }
    asked = TaskOptions(tasks, data, data_dir, numerics, options, output, margin) if wants_tasks else None
    if asked:
        asked.check()
    text = _read_text(ppl or BUILTIN) if wants_text and not (saved and not ppl) else None
    with console.progress() as progress:
        target = None if remote else find_model(model, keep_blocks=True, progress=progress)
        baseline_folder = find_model(baseline, keep_blocks=True, progress=progress) if baseline and not saved else None
    if asked:
        asked.load()
    if remote:
        from llmq.evals.served_subject import ServedSubject

        target = ServedSubject.open(model, tokenizer_folder=tokenizer, api_key=api_key)

    record = result.new_record() | dict.fromkeys(("model", "baseline", "text", "tasks", "baseline_tasks", "comparison"))
    record["options"] = options | asdict(numerics)
    if text is not None:
        subjects, evaluation = run_text(
            target, text, ppl or BUILTIN, baseline_folder, numerics, (window, stride, limit)
        )
        record |= {"text": evaluation.to_dict(), **_described(subjects)}
        if not as_json:
            print_text_evaluation(evaluation, subjects[0].engine.info.weight_bytes, _weight_bytes(subjects[1]))
        del subjects
    verdict = None
    if asked:
        verdict = run_and_compare(asked, target, baseline_folder, saved_samples, margin, record, is_quiet=as_json)
    if as_json:
        console.print_json(result.plain_json(record))
    if output:
        result.save_record(record, output)
        console.status(f"saved {output}")
    if asked:
        asked.forget_answers()
    if verdict is not None and verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


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


def run_text(
    folder: Path,
    text: str,
    source: str,
    baseline_folder: Path | None,
    numerics: "Numerics",
    plan_options: tuple[int | None, int | None, int | None] = (None, None, None),
) -> tuple[tuple["Subject", "Subject | None"], "TextEvaluation"]:
    """Candidate and baseline on one text; `plan_options`: window, stride, most windows. Says what was decided."""
    from llmq.evals.evaluation import Subject, evaluate_text, plan_text, resolve_window
    from llmq.runtime.frontend.tokenizer import Tokenizer

    window, stride, max_windows = plan_options
    window = resolve_window(folder, window)
    baseline_tokenizer = Tokenizer.from_folder(baseline_folder) if baseline_folder else None
    encoded, plan = plan_text(
        Tokenizer.from_folder(folder),
        text,
        source,
        window=window,
        stride=stride,
        max_windows=max_windows,
        baseline=baseline_tokenizer,
    )
    folders = [folder, *([baseline_folder] if baseline_folder else [])]
    opened = [Subject.open(path, numerics, max_model_len=window, max_num_seqs=2) for path in folders]
    candidate, baseline = opened[0], opened[1] if baseline_folder else None
    for name, subject in (("model", candidate), ("baseline", baseline)):
        if subject:
            console.status(f"{name}: {subject.folder} ({numerics_line(subject)})")
    console.status(
        f"text: {source}, {plan.num_tokens:,} of {len(encoded.token_ids):,} tokens, window {window}, "
        f"stride {plan.stride}, {encoded.bos_policy}; first ids {plan.prompt(0, encoded.token_ids)[:8]}"
    )
    with console.progress() as progress:
        return (candidate, baseline), evaluate_text(candidate, encoded, plan, baseline, progress)


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _check_served(url: str, items: object, ppl: str | None, numerics: "Numerics") -> None:
    """Raises InputError for what is asked of a server and can only be had in this process."""
    from llmq.evals.numerics import Numerics

    if ppl or not items:
        raise InputError(f"{url} is asked by --tasks or --data; perplexity of a text is had of a folder")
    if numerics != Numerics():
        raise InputError(f"{url} computes as it was started: leave --dtype, --kv-dtype, --device, --kernels, … away")


def _numerics(
    dtype: str, kv_dtype: str, device: str, kernels: str, threads: int | None, batch_invariant: bool
) -> "Numerics":
    from llmq.evals.numerics import Numerics
    from llmq.runtime.dtypes import parse_dtype

    check_device(device)
    check_kernels(kernels)
    return Numerics(
        parse_dtype("--dtype", dtype), parse_dtype("--kv-dtype", kv_dtype), device, kernels, threads, batch_invariant
    )


def _read_text(source: str) -> str:
    from llmq.evals.text import read_text
    from llmq.quantize.builtin_text import builtin_text

    return builtin_text("heldout") if source == BUILTIN else read_text(Path(source))


def _described(subjects: tuple["Subject", "Subject | None"]) -> dict[str, Any]:
    from llmq.evals.result import describe_model

    described = [describe_model(s.folder, s.engine.info) if s else None for s in subjects]
    return {"model": described[0], "baseline": described[1]}


def _weight_bytes(subject: "Subject | None") -> int | None:
    return subject.engine.info.weight_bytes if subject else None
