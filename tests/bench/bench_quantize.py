"""Quantizers side by side: perplexity and KL of what they make, and the time and memory they take.

SmolLM2-135M on WikiText-2 (test), as it is and off the 4-bit grid it came from (dither.py); every quantizer calibrates
on the same tokens of the train slice, at the same bits: 4 and 3 bits in groups of 64 with zero points, INT8 and FP8
with one scale a row and activations rounded per token. Each runs alone, in a process of its own; what it made is
dequantized and scored by one evaluator (quantize_peers/evaluate.py). Results are JSON lines under --work: what is there
is not done again, so that a run can be stopped, and --windows raised later.
"""

import argparse
import json
import math
import os
import subprocess
from pathlib import Path

import bench_report
from bench_report import Report
from quantize_peers.dither import dithered_copy
from quantize_peers.job import SCHEMES, Job
from quantize_peers.methods import FOLDER, METHODS, Method
from quantize_peers.results import ResultsFile, Row

from llmq.cli import console
from llmq.profiles.cache import cache_dir
from llmq.profiles.checkpoint import find_model
from llmq.quantize.calibration import load_calibration, load_tokenizer

WINDOW = 2048


class Bench:
    """The rows asked for, each quantized once and scored window by window."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work = Path(arguments.work)
        self.results = ResultsFile(self.work / "results.jsonl")
        folder = find_model(arguments.model)
        self.models = {"as is": folder}
        if "dithered" in arguments.models:
            self.models["dithered"] = dithered_copy(folder, self.work / "dithered")
        self.tokenizer = load_tokenizer(folder)
        self.windows = self._windows()
        self.calibration = f"{arguments.samples}x{arguments.seq_len}"
        self._evaluators = {}

    def _windows(self) -> list[list[int]]:
        text = Path(self.arguments.text).read_text(encoding="utf-8")
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        pieces = [ids[begin : begin + WINDOW] for begin in range(0, len(ids), WINDOW)]
        pieces = [piece for piece in pieces if len(piece) > 1]
        return pieces if self.arguments.windows == "all" else pieces[: int(self.arguments.windows)]

    def rows(self) -> list[tuple[Row, Method]]:
        wanted, made = self.arguments.methods, []
        for model in self.arguments.models:
            for scheme in self.arguments.schemes:
                made += [
                    (Row(model, scheme, method.name, method.version(), self.calibration), method)
                    for method in METHODS
                    if scheme in method.schemes and (not wanted or method.name in wanted)
                ]
        return made

    def quantize(self, row: Row, method: Method) -> None:
        """Run the driver, unless its row is there. One that fails is reported, and left out of the table."""
        job = self._job(row, method)
        if row in self.results.quantized and (job.dense.exists() or self._is_scored(row)):
            return
        console.status(f"quantizing: {row.folder}")
        command = [str(method.python()), str(FOLDER / f"drive_{method.driver}.py"), str(job.save())]
        log = Path(job.out) / "log.txt"
        with open(log, "w", encoding="utf-8") as output:
            ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
        if ended.returncode or not job.dense.exists():
            lines = log.read_text(encoding="utf-8").strip().splitlines()
            console.warn(f"{row.folder} failed: {lines[-1] if lines else ended.returncode} ({log})")
            return
        measured = json.loads((Path(job.out) / "measured.json").read_text(encoding="utf-8"))
        self.results.add(row, {**measured, "load_average": os.getloadavg()[0]})

    def _job(self, row: Row, method: Method) -> Job:
        arguments = self.arguments
        text = {"text": arguments.calib, "num_samples": arguments.samples, "seq_len": arguments.seq_len}
        return Job(
            model=str(self.models[row.model]),
            out=str(self.work / "checkpoints" / row.folder),
            scheme=SCHEMES[row.scheme],
            samples=self._samples(),
            calibration=text,
            options=method.options,
        )

    def _samples(self) -> list[list[int]]:
        """The tokens that `llmq quantize` draws from the same file by the same seed."""
        arguments = self.arguments
        found = load_calibration(
            arguments.calib, self.tokenizer, num_samples=arguments.samples, seq_len=arguments.seq_len
        )
        return [list(ids) for ids in found.samples]

    def _is_scored(self, row: Row) -> bool:
        return set(range(len(self.windows))) <= self.results.windows.get(row, {}).keys()

    def score(self, row: Row, method: Method, indices: range) -> None:
        """Score windows `indices` of the row, and of its 16-bit model, where they are not there yet."""
        if row not in self.results.quantized:
            return
        job, reference = self._job(row, method), self.reference(row.model)
        for index in indices:
            if index not in self.results.windows.get(reference, {}):
                self.results.add(reference, {"window": index, **self._evaluator(row.model).reference(index)})
            if index not in self.results.windows.get(row, {}):
                found = self._evaluator(row.model).measure(index, job.dense, job.scheme.activations)
                self.results.add(row, {"window": index, **found})

    def reference(self, model: str) -> Row:
        return Row(model, "bf16", "16 bit", "1", "")

    def _evaluator(self, model: str):
        from quantize_peers.evaluate import Evaluator

        if model not in self._evaluators:
            cache = self.work / "reference" / model.replace(" ", "_")
            self._evaluators[model] = Evaluator(self.models[model], self.windows, cache)
        return self._evaluators[model]


def measure(arguments: argparse.Namespace) -> Report:
    bench = Bench(arguments)
    rows = bench.rows()
    step = arguments.windows_at_once
    for begin in range(0, len(bench.windows), step):
        for row, method in rows if not arguments.only_report else ():
            bench.quantize(row, method)
            bench.score(row, method, range(begin, min(begin + step, len(bench.windows))))
    return report(bench, [row for row, _ in rows])


def report(bench: Bench, rows: list[Row]) -> Report:
    """Over the windows that all rows of a model have."""
    results, lines, figures = bench.results, [], []
    for model in bench.arguments.models:
        done = [row for row in rows if row.model == model and results.windows.get(row)]
        shared = results.common_windows([*done, bench.reference(model)]) if done else []
        if not shared:
            continue
        for row in (bench.reference(model), *done):
            total, cost = results.total(row, shared), results.quantized.get(row, {})
            ppl = math.exp(total.mean_nll)
            figures.append({**vars(row), "ppl": ppl, **vars(total), **cost})
            lines.append(
                [
                    model,
                    row.scheme,
                    f"{row.method} {row.version}" if cost else row.method,
                    f"{ppl:.3f}",
                    f"{total.mean_kl:.4f}",
                    f"{total.top1_agreement:.1%}",
                    *([f"{cost['wall_s']:.0f}", f"{cost['cpu_s']:.0f}"] if cost else ["", ""]),
                    console.format_bytes(cost["above_imports_bytes"]) if cost else "",
                    f"{total.num_scored:,}",
                ]
            )
        lines.append([])
    columns = ["model", "scheme", "method", ">ppl", ">KL", ">top-1", ">wall s", ">CPU s", ">memory", ">tokens"]
    notes = [
        "KL and top-1 are against the model's own 16 bit; bf16 forward, dequantized weights.",
        "Times on a machine with other work on it are upper bounds; memory is the peak resident set above the imports.",
    ]
    return Report(f"calibrated on {bench.calibration} tokens", columns, lines, {"rows": figures}, notes)


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--models", type=_words, default=["dithered", "as is"], help="dithered,as is")
    options.add_argument("--schemes", type=_words, default=list(SCHEMES), help=",".join(SCHEMES))
    options.add_argument("--methods", type=_words, default=[], help=f"of {', '.join(m.name for m in METHODS)}")
    options.add_argument("--text", default=str(bench_report.shared_path("text", "wikitext2-raw.test.txt")))
    options.add_argument("--calib", default=str(bench_report.shared_path("text", "wikitext2-raw.train-1MB.txt")))
    options.add_argument("--samples", type=int, default=32)
    options.add_argument("--seq-len", type=int, default=512)
    options.add_argument("--windows", default="20", help="the first N windows of 2048 tokens, or all")
    options.add_argument("--windows-at-once", type=int, default=4, help="score all rows on N before going on")
    options.add_argument("--work", default=str(cache_dir() / "bench-quantize"))
    options.add_argument("--only-report", action="store_true", help="print what is there")
    return bench_report.run(options.parse_args(argv), measure)


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
