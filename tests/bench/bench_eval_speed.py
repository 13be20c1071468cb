"""Wall time of lm-eval's tasks on our engine and on lm-eval's own `hf` backend, and whether both predict the same.

The same items in one process: prompts, few-shot examples and metrics are lm-eval's for both, and the time is that of
the whole evaluation without loading. `hf` first tries batch sizes on the first --probe items of each task, from the
smallest on until one is clearly slower, and takes its fastest. With --work each timing is kept as it is made, and the
same command goes on after an interruption.

    bench_eval_speed.py --threads 2 --work FOLDER --json > RESULT.json
"""

import argparse
import time
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench_report
import torch
from bench_report import Report
from kept_pieces import KeptPieces, Piece

from llmq.cli import console
from llmq.evals.evaluation import Subject
from llmq.evals.harness import EngineLM
from llmq.evals.numerics import Numerics
from llmq.evals.samples import Sample, samples_of
from llmq.evals.task_run import evaluate_tasks
from llmq.evals.tasks import load_named_tasks, quiet_libraries
from llmq.profiles.checkpoint import find_model

LIMITS = {"arc_easy": 200, "hellaswag": 200, "lambada_openai": 200, "gsm8k": 50}
_TORCH = {"fp32": "float32", "bf16": "bfloat16"}


class Backends:
    """The two, each loaded when it is first asked: a run that goes on may need one only."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._folder = find_model(arguments.model)
        self._numerics = Numerics(arguments.dtype, device="cpu", kernels=arguments.kernels, threads=arguments.threads)

    @cache  # noqa: B019 (lives as long as the program)
    def _subject(self) -> Subject:
        return Subject.open(self._folder, self._numerics)

    @cache  # noqa: B019
    def _hf(self) -> Any:
        from lm_eval.models.huggingface import HFLM

        longest = EngineLM(self._subject().engine, self._subject().tokenizer).max_length
        return HFLM(
            pretrained=str(self._folder),
            device="cpu",
            dtype=_TORCH[self._numerics.dtype],
            batch_size=1,
            max_length=longest,
        )

    def ours(self) -> EngineLM:
        return EngineLM(self._subject().engine, self._subject().tokenizer)

    def hf(self, batch_size: int) -> Any:
        lm = self._hf()
        lm.batch_size_per_gpu = batch_size
        return lm


def timed(lm: Any, task: str, data_dir: Path, limit: int) -> Piece:
    loaded = load_named_tasks([task], data_dir)
    started_s = time.perf_counter()
    results = evaluate_tasks(lm, loaded, limit=limit)
    seconds = time.perf_counter() - started_s
    return {"seconds": seconds, "samples": [asdict(sample) for sample in samples_of(results["samples"], {})]}


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
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    settings = {name: getattr(arguments, name) for name in ("model", "dtype", "kernels", "threads")}
    settings |= {name: version(name) for name in ("torch", "transformers", "lm_eval")}
    kept = KeptPieces(arguments.work, settings | {"probe": arguments.probe, "data_dir": arguments.data_dir})
    backends = Backends(arguments)
    return _report(arguments, {task: _compare(task, arguments, backends, kept) for task in arguments.tasks})


def _compare(task: str, arguments: argparse.Namespace, backends: Backends, kept: KeptPieces) -> dict[str, Any]:
    limit = arguments.limit.get(task) or arguments.limit.get("") or LIMITS.get(task, 200)
    on_items = partial(timed, task=task, data_dir=Path(arguments.data_dir))
    probe = min(arguments.probe, limit)
    probed: dict[int, float] = {}
    for size in sorted(arguments.batch_sizes):
        name = f"{task}.hf.batch-{size}.{probe}-items"
        probed[size] = kept.get(name, lambda size=size: on_items(backends.hf(size), limit=probe))["seconds"]
        console.status(f"{task}, {probe} items: hf with a batch of {size} in {probed[size]:.1f} s")
        if probed[size] > 1.1 * min(probed.values()):
            break
    best = min(probed, key=probed.get)
    hf = kept.get(f"{task}.hf.{limit}-items", lambda: on_items(backends.hf(best), limit=limit) | {"batch_size": best})
    console.status(f"{task}, {limit} items: hf with a batch of {hf['batch_size']} in {hf['seconds']:.1f} s")
    ours = kept.get(f"{task}.ours.{limit}-items", lambda: on_items(backends.ours(), limit=limit))
    console.status(f"{task}, {limit} items: ours in {ours['seconds']:.1f} s")
    pairs = zip(ours["samples"], hf["samples"], strict=True)
    found = [difference(Sample(**mine), Sample(**theirs)) for mine, theirs in pairs]
    return {
        "items": len(ours["samples"]),
        "hf_batch_size": hf["batch_size"],
        "hf_probe_s": probed,
        "hf_s": hf["seconds"],
        "ours_s": ours["seconds"],
        "speedup": hf["seconds"] / ours["seconds"],
        "different": [one for one in found if one is not None],
    }


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


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--data-dir", default=str(bench_report.shared_path("tasks")))
    options.add_argument("--tasks", type=bench_report.names, default=list(LIMITS))
    options.add_argument("--limit", type=bench_report.limits, default={}, help="100, or arc_easy=100,gsm8k=20")
    options.add_argument("--batch-sizes", type=bench_report.whole_numbers, default=[1, 4, 8, 16, 32], help="of hf")
    options.add_argument("--probe", type=int, default=8, help="items on which a batch size is tried")
    options.add_argument("--work", type=Path, help="folder in which each timing is kept, for a run that goes on")
    options.add_argument("--dtype", choices=list(_TORCH), default="fp32")
    options.add_argument("--kernels", choices=("auto", "torch", "native"), default="auto", help="of ours")
    options.add_argument("--threads", type=int, default=1)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
