"""Wall time of lm-eval's tasks on our engine and on lm-eval's own `hf` backend, and whether both predict the same.

The same items in one process: prompts, few-shot examples and metrics are lm-eval's for both, and the time is that of
the whole evaluation without loading. `hf` first tries each batch size on the first --probe items and takes its fastest.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_report
import torch
from bench_report import Report

from llmq.evals.evaluation import Subject
from llmq.evals.harness import EngineLM
from llmq.evals.numerics import Numerics
from llmq.evals.samples import Sample, samples_of
from llmq.evals.task_run import evaluate_tasks
from llmq.evals.tasks import load_named_tasks, quiet_libraries
from llmq.profiles.checkpoint import find_model

LIMITS = {"arc_easy": 200, "hellaswag": 200, "lambada_openai": 200, "gsm8k": 50}
_TORCH = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Timed:
    samples: list[Sample]
    seconds: float


def timed(lm: Any, task: str, data_dir: Path, limit: int) -> Timed:
    loaded = load_named_tasks([task], data_dir)
    started_s = time.perf_counter()
    results = evaluate_tasks(lm, loaded, limit=limit)
    return Timed(samples_of(results["samples"], {}), time.perf_counter() - started_s)


def prediction(sample: Sample) -> Any:
    """The choice that is likeliest, whether greedy decoding writes the continuation, or the text."""
    if not isinstance(sample.answers[0], list):
        return sample.answers[0]
    if len(sample.answers) == 1:
        return sample.answers[0][1]
    scores = [float(answer[0]) for answer in sample.answers]
    return scores.index(max(scores))


def difference(ours: Sample, theirs: Sample) -> dict[str, Any] | None:
    """What the two backends predict where that is not the same, and by what margin each; None where it is."""
    found = {"ours": prediction(ours), "hf": prediction(theirs)}
    if found["ours"] == found["hf"]:
        return None
    if isinstance(found["hf"], int) and not isinstance(found["hf"], bool):
        for name, sample in (("ours", ours), ("hf", theirs)):
            best, second = sorted((float(answer[0]) for answer in sample.answers), reverse=True)[:2]
            found[f"{name}_margin_nats"] = best - second
    elif isinstance(found["hf"], bool):
        found |= {f"{name}_nats": float(one.answers[0][0]) for name, one in (("ours", ours), ("hf", theirs))}
    else:
        pairs = zip(found["ours"], found["hf"], strict=False)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, (found["ours"], found["hf"]))))
        found = {"parted_at_character": parted, "ours": found["ours"][parted:][:40], "hf": found["hf"][parted:][:40]}
    return {"doc_id": ours.doc_id, **found}


def measure(arguments: argparse.Namespace) -> Report:
    from lm_eval.models.huggingface import HFLM

    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    folder, data_dir = find_model(arguments.model), Path(arguments.data_dir)
    subject = Subject.open(folder, Numerics(dtype=arguments.dtype, device="cpu", threads=arguments.threads))
    longest = EngineLM(subject.engine, subject.tokenizer).max_length
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype=_TORCH[arguments.dtype], batch_size=1, max_length=longest)
    figures: dict[str, Any] = {}
    for task in arguments.tasks:
        limit = min(arguments.limit or LIMITS.get(task, 200), LIMITS.get(task, 200))
        probed = {}
        for size in arguments.batch_sizes:
            theirs.batch_size_per_gpu = size
            probed[size] = timed(theirs, task, data_dir, min(arguments.probe, limit)).seconds
        theirs.batch_size_per_gpu = best = min(probed, key=probed.get)
        hf = timed(theirs, task, data_dir, limit)
        ours = timed(EngineLM(subject.engine, subject.tokenizer), task, data_dir, limit)
        found = [difference(*pair) for pair in zip(ours.samples, hf.samples, strict=True)]
        figures[task] = {
            "items": len(ours.samples),
            "hf_batch_size": best,
            "hf_probe_s": probed,
            "hf_s": hf.seconds,
            "ours_s": ours.seconds,
            "speedup": hf.seconds / ours.seconds,
            "different": [one for one in found if one is not None],
        }
    return _report(arguments, figures)


def _report(arguments: argparse.Namespace, figures: dict[str, Any]) -> Report:
    seconds = {name: sum(one[f"{name}_s"] for one in figures.values()) for name in ("hf", "ours")}
    rows = [
        [
            *(task, one["items"], one["hf_batch_size"], f"{one['hf_s']:.1f}", f"{one['ours_s']:.1f}"),
            *(f"{one['speedup']:.2f}", len(one["different"])),
        ]
        for task, one in figures.items()
    ]
    rows += [
        [],
        ["all", "", "", f"{seconds['hf']:.1f}", f"{seconds['ours']:.1f}", f"{seconds['hf'] / seconds['ours']:.2f}"],
    ]
    return Report(
        f"{arguments.model} in {arguments.dtype}, {arguments.threads} thread(s)",
        ["task", ">items", ">hf's batch", ">hf s", ">ours s", ">times faster", ">differ"],
        rows,
        figures,
        [f"{task}: {one}" for task, of_task in figures.items() for one in of_task["different"]],
    )


def _names(text: str) -> list[str]:
    return text.split(",")


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--data-dir", default=str(bench_report.shared_path("tasks")))
    options.add_argument("--tasks", type=_names, default=list(LIMITS))
    options.add_argument("--limit", type=int, help="items of a task, at most 200 (50 of gsm8k), which are the default")
    options.add_argument("--batch-sizes", type=bench_report.whole_numbers, default=[1, 4, 16, 64], help="of hf")
    options.add_argument("--probe", type=int, default=16, help="items on which a batch size is tried")
    options.add_argument("--dtype", choices=list(_TORCH), default="fp32")
    options.add_argument("--threads", type=int, default=1)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
