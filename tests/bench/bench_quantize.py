"""Quantizers side by side: perplexity and KL of what they make, and the time and memory they take.

SmolLM2-135M on WikiText-2 (test), as it is and off the 4-bit grid it came from (dither.py); every quantizer calibrates
on the same tokens of the train slice, at the same bits: 4 and 3 bits in groups of 64 with zero points, INT8 and FP8
with one scale a row and activations rounded per token. Each runs alone, in a process of its own; what it made is
dequantized and scored by one evaluator (quantize_peers/evaluate.py). Results are JSON lines under --work: what is there
is not done again, so that a run can be stopped, and --windows raised later.
"""

import argparse
import functools
import json
import math
import os
import shutil
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
from llmq.profiles.machine import cpu_flags
from llmq.quantize.calibration import load_calibration, load_tokenizer

WINDOW = 2048


class Bench:
    """The rows asked for, each quantized once and scored window by window."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work = Path(arguments.work or cache_dir() / "bench-quantize" / Path(arguments.model).name).absolute()
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
        shutil.rmtree(job.out, ignore_errors=True)
        command = [str(method.python()), str(FOLDER / f"drive_{method.driver}.py"), str(job.save())]
        log = Path(job.out) / "log.txt"
        code = _run(command, log, self.arguments.time_limit)
        if code or not (Path(job.out) / "measured.json").exists():
            lines = log.read_text(encoding="utf-8").strip().splitlines()
            console.warn(f"{row.folder} failed: {lines[-1] if lines else code} ({log})")
            return
        measured = json.loads((Path(job.out) / "measured.json").read_text(encoding="utf-8"))
        self.results.add(row, {**measured, "load_average": os.getloadavg()[0]})

    def _job(self, row: Row, method: Method) -> Job:
        arguments = self.arguments
        text = {
            "text": str(Path(arguments.calib).absolute()),
            "num_samples": arguments.samples,
            "seq_len": arguments.seq_len,
        }
        return Job(
            model=str(self.models[row.model]),
            out=str(self.work / "checkpoints" / row.folder),
            scheme=SCHEMES[row.scheme],
            samples=self.samples,
            calibration=text,
            dtype=peer_dtype(),
            options=method.options,
        )

    @functools.cached_property
    def samples(self) -> list[list[int]]:
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
        if not self.results.quantized.get(row, {}).get("is_whole", True) or row not in self.results.quantized:
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


def peer_dtype() -> str:
    """Where a CPU has no products of bf16, torch takes eight times as long for them as for float32's. llm-compressor
    and auto-round are given what is faster, as `llmq quantize` takes it for itself; GPTQModel chooses by itself."""
    return "float32" if cpu_flags().isdisjoint(("avx512_bf16", "amx_bf16")) else "bfloat16"


def _run(command: list[str], log: Path, time_limit_s: float | None) -> int:
    """The exit code: 0 too for a driver that reached the limit, was told to end, and hands back what it measured."""
    with open(log, "w", encoding="utf-8") as output:
        # In its own folder: GPTQModel writes logs into the current one.
        driver = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
        try:
            return driver.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            driver.terminate()
            driver.wait()
            return 0
        except BaseException:
            driver.kill()
            raise


def measure(arguments: argparse.Namespace) -> Report:
    bench = Bench(arguments)
    rows = bench.rows()
    step = arguments.windows_at_once
    for begin in range(0, max(1, len(bench.windows)), step):
        for row, method in rows if not arguments.only_report else ():
            bench.quantize(row, method)
            bench.score(row, method, range(begin, min(begin + step, len(bench.windows))))
    return report(bench, [row for row, _ in rows])


def report(bench: Bench, rows: list[Row]) -> Report:
    """Each row over the windows that all rows of its model have; costs alone where nothing is scored."""
    results, lines, figures = bench.results, [], []
    for model in bench.arguments.models:
        of_model = [row for row in rows if row.model == model and row in results.quantized]
        scored = [row for row in of_model if row in results.windows]
        shared = results.common_windows([bench.reference(model), *scored])
        for row in (*([bench.reference(model)] if shared else []), *of_model):
            figure = {**vars(row), **results.quantized.get(row, {})}
            if shared and row in results.windows:
                total = results.total(row, shared)
                figure |= {"ppl": math.exp(total.mean_nll), **vars(total)}
            figures.append(figure)
            name = f"{row.method} {row.version}" if row in results.quantized else row.method
            lines.append([model, row.scheme, name, *_cells(figure)])
        lines.append([])
    columns = ["model", "scheme", "method", ">ppl", ">KL", ">top-1", ">tokens", ">wall s", ">CPU s", ">memory"]
    notes = [
        "KL and top-1 are against the model's own 16 bit; bf16 forward, dequantized weights.",
        "Times on a machine with other work on it are upper bounds; memory is the peak resident set above the imports.",
    ]
    return Report(f"calibrated on {bench.calibration} tokens", columns, lines, {"rows": figures}, notes)


def _cells(figure: dict) -> list[str]:
    quality, cost = [""] * 4, [""] * 3
    if "ppl" in figure:
        quality = [f"{figure['ppl']:.3f}", f"{figure['mean_kl']:.4f}", f"{figure['top1_agreement']:.1%}"]
        quality.append(f"{figure['num_scored']:,}")
    if "wall_s" in figure:
        at_least = "" if figure.get("is_whole", True) else ">"
        cost = [f"{at_least}{figure['wall_s']:.0f}", f"{at_least}{figure['cpu_s']:.0f}"]
        cost.append(console.format_bytes(figure["above_imports_bytes"]))
    return [*quality, *cost]


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
    options.add_argument("--time-limit", type=float, help="seconds; a row cut short has its cost so far, and no score")
    options.add_argument("--work", help="folder of results and checkpoints; one for each --model")
    options.add_argument("--only-report", action="store_true", help="print what is there")
    return bench_report.run(options.parse_args(argv), measure)


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
