"""`llmq eval`: perplexity, divergence from a baseline, and tasks, on the runtime that serves."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.cli.engine_options import check_device
from llmq.profiles.errors import InputError

if TYPE_CHECKING:
    from llmq.evals.evaluation import Subject, TextEvaluation
    from llmq.evals.numerics import Numerics
    from llmq.evals.task_run import TaskRun
    from llmq.evals.tasks import LoadedTasks

BUILTIN = "builtin"
# Above this share of generations that hit the cap or came back empty, a score says little about the model.
_SUSPECT_SHARE = 0.02

app = typer.Typer(add_completion=False)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or smollm2-135m.")],
    ppl: Annotated[str | None, typer.Option(help="Text file for perplexity, or builtin (the default).")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens scored together.  [default: 2048]")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between windows.  [default: window]")] = None,
    baseline: Annotated[str | None, typer.Option(help="Original model: KL divergence and top-1 agreement.")] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks by name: arc_easy,hellaswag.")] = None,
    data: Annotated[Path | None, typer.Option(help="Your own JSONL: choices, or prompt and answer.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First N items of a task, N windows of a text.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in a prompt.  [default: the task's]")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Tasks as conversations.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), bf16, fp16 or fp32.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32, int8, fp8 or int4.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.  [default: all cores]")] = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="As serve has it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the JSON object here.")] = None,
) -> None:
    """Score a model on the runtime that serves it: perplexity, divergence from --baseline, lm-eval tasks, your own set.

    Without --ppl, --tasks and --data: perplexity of a built-in English text that no calibration of llmq uses.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the bars here are console's
    numerics = _numerics(dtype, kv_dtype, device, threads, batch_invariant)
    wants_tasks, wants_text = bool(tasks or data), bool(ppl or baseline or not (tasks or data))
    if not wants_tasks and (num_fewshot is not None or apply_chat_template):
        raise InputError("--num-fewshot and --apply-chat-template are about tasks: give --tasks or --data with them")
    if not wants_text and (window is not None or stride is not None):
        raise InputError("--window and --stride are about a text: give --ppl with them")
    from llmq.evals import result
    from llmq.profiles.checkpoint import find_model

    if output:
        result.check_output_path(output)
    if tasks:
        from llmq.evals.tasks import check_task_names

        check_task_names(_names(tasks))
    text = _read_text(ppl or BUILTIN) if wants_text else None
    with console.progress() as progress:
        folder = find_model(model, keep_blocks=True, progress=progress)
        baseline_folder = find_model(baseline, keep_blocks=True, progress=progress) if baseline else None
    loaded = _load_tasks(tasks, data) if wants_tasks else None

    record = result.new_record() | {"model": None, "baseline": None, "text": None, "tasks": None}
    options = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template}
    record["options"] = options | asdict(numerics)
    if text is not None:
        subjects, evaluation = run_text(
            folder, text, ppl or BUILTIN, baseline_folder, numerics, (window, stride, limit)
        )
        record |= {"text": evaluation.to_dict(), **_described(subjects)}
        if not as_json:
            print_text_evaluation(evaluation, subjects[0].engine.info.weight_bytes, _weight_bytes(subjects[1]))
    if loaded:
        subject, run = _run_tasks(folder, loaded, numerics, options)
        record |= {"tasks": run.to_dict(), "model": result.describe_model(folder, subject.engine.info)}
        if not as_json:
            _print_tasks(run)
    if as_json:
        console.print_json(result.plain_json(record))
    if output:
        result.save_record(record, output)
        console.status(f"saved {output}")


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
            console.status(f"{name}: {subject.folder} ({_numerics_line(subject)})")
    console.status(
        f"text: {source}, {plan.num_tokens:,} of {len(encoded.token_ids):,} tokens, window {window}, "
        f"stride {plan.stride}, {encoded.bos_policy}; first ids {plan.prompt(0, encoded.token_ids)[:8]}"
    )
    with console.progress() as progress:
        return (candidate, baseline), evaluate_text(candidate, encoded, plan, baseline, progress)


def print_text_evaluation(evaluation: "TextEvaluation", weight_bytes: int, baseline_bytes: int | None) -> None:
    """The measures with what each one is, beside those of the baseline where there was one."""
    p, d = evaluation.perplexity, evaluation.divergence
    title = (
        f"{evaluation.text.source}: {p.num_scored:,} of {p.num_tokens:,} tokens scored in {p.num_windows} windows "
        f"of {p.window}, stride {p.stride}; {console.format_duration(p.elapsed_s)}"
    )
    definitions = evaluation.to_dict()["definitions"]
    names = {"token_ppl": "token perplexity", "word_ppl": "word perplexity", "bits_per_byte": "bits per byte"}
    if p.token_ppl_full_windows not in (None, p.token_ppl):
        names["token_ppl_full_windows"] = "  full windows only"
    rows = [[names[key], *_both(key, p, d and d.baseline), definitions[key]] for key in definitions if key in names]
    size = [console.format_bytes(n) for n in (baseline_bytes, weight_bytes) if n is not None]
    rows.append(["weights in memory", *size, ""])
    console.print_table(title, ["", *([">baseline"] if d else []), ">model", "what it is"], rows)
    if d:
        values = (f"{d.mean_kl:.5f}", f"{d.p99_kl:.5f}", f"{d.max_kl:.4f}", f"{d.top1_agreement:.2%}")
        labels = ("mean KL", "99th percentile KL", "largest KL", "top-1 agreement")
        keys = ("mean_kl", "p99_kl", "max_kl", "top1_agreement")
        rows = [[label, value, definitions[key]] for label, value, key in zip(labels, values, keys, strict=True)]
        console.print_table("against the baseline", ["", ">", "what it is"], rows)


def _both(key: str, candidate: Any, baseline: Any) -> list[str]:
    return [f"{getattr(measured, key):.4f}" for measured in (baseline, candidate) if measured is not None]


def _numerics(dtype: str, kv_dtype: str, device: str, threads: int | None, batch_invariant: bool) -> "Numerics":
    from llmq.evals.numerics import Numerics
    from llmq.runtime.dtypes import parse_dtype

    check_device(device)
    return Numerics(
        parse_dtype("--dtype", dtype), parse_dtype("--kv-dtype", kv_dtype), device, threads, batch_invariant
    )


def _read_text(source: str) -> str:
    from llmq.evals.text import read_text
    from llmq.quantize.builtin_text import builtin_text

    return builtin_text("heldout") if source == BUILTIN else read_text(Path(source))


def _names(tasks: str | None) -> list[str]:
    return [name.strip() for name in (tasks or "").split(",") if name.strip()]


def _load_tasks(names: str | None, data: Path | None) -> "LoadedTasks":
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise InputError("--tasks and --data need lm-eval: pip install 'llmq-toolkit[eval]'") from error
    from llmq.evals.own_set import as_lm_eval_task, read_own_set
    from llmq.evals.tasks import LoadedTasks, load_named_tasks

    wanted = _names(names)
    loaded = load_named_tasks(wanted) if wanted else LoadedTasks()
    if data:
        own_set = read_own_set(data)
        console.status(f"data: {data}, {len(own_set.items)} items, {own_set.kind.replace('_', ' ')}")
        if own_set.name in loaded.tasks:
            raise InputError(f"--data {data} would be called as the task {own_set.name}: rename the file")
        loaded.tasks[own_set.name] = as_lm_eval_task(own_set)
    if not loaded.tasks:
        raise InputError(f"--tasks {names!r} names no task")
    return loaded


def _run_tasks(
    folder: Path, loaded: "LoadedTasks", numerics: "Numerics", options: dict[str, Any]
) -> tuple["Subject", "TaskRun"]:
    from llmq.evals.evaluation import Subject
    from llmq.evals.harness import EngineLM
    from llmq.evals.task_run import run_tasks

    subject = Subject.open(folder, numerics)
    shown = ", ".join(
        f"{name.replace('_', ' ')} {'default' if value is None else value}" for name, value in options.items()
    )
    console.status(f"model: {folder} ({_numerics_line(subject)})")
    console.status(f"tasks: {', '.join(loaded.tasks)}; {shown}")
    with console.progress() as progress:
        lm = EngineLM(subject.engine, subject.tokenizer, progress)
        run = run_tasks(lm, loaded, **options)
    console.status(f"first ids {run.first_token_ids}")
    return subject, run


def _print_tasks(run: "TaskRun") -> None:
    rows = [
        [
            s.task,
            s.metric,
            f"{s.value:.4f}",
            f"± {s.stderr:.4f}" if s.stderr is not None else "",
            s.num_items,
            s.num_fewshot,
        ]
        for s in run.scores
    ]
    console.print_table("lm-eval", ["task", "metric", ">value", "", ">items", ">few-shot"], rows)
    counts = run.counts
    remarks = {
        "contexts cut from the left to fit the model": counts.num_truncated,
        "continuations encoded apart from their context (they left no token of their own)": counts.num_encoded_apart,
        "continuations sharing a token with their context": counts.num_unequal_joins,
        "conversations without their system turn, which the chat template refuses": counts.num_system_dropped,
    }
    for remark, count in remarks.items():
        if count:
            console.print_text(f"  {count:,} {remark}")
    for what, count in (("ended at max_gen_toks", counts.num_hit_cap), ("came back empty", counts.num_empty)):
        if count:
            share = count / counts.num_generations
            say = console.warn if share > _SUSPECT_SHARE else console.status
            say(f"{count:,} of {counts.num_generations:,} generations ({share:.1%}) {what}")


def _described(subjects: tuple["Subject", "Subject | None"]) -> dict[str, Any]:
    from llmq.evals.result import describe_model

    described = [describe_model(s.folder, s.engine.info) if s else None for s in subjects]
    return {"model": described[0], "baseline": described[1]}


def _weight_bytes(subject: "Subject | None") -> int | None:
    return subject.engine.info.weight_bytes if subject else None


def _numerics_line(subject: "Subject") -> str:
    return ", ".join(f"{name} {value}" for name, value in subject.engine.info.fingerprint.items())
