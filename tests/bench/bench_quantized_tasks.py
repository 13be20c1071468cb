"""Quantized checkpoints against the original: tasks, perplexity and divergence by `llmq eval`, in one table.

Each checkpoint is made by `llmq quantize` as a user would, the original answers each task once, and the others are
compared with that saved result item by item. WikiText-2's perplexity of the original is held against transformers' own
forward over the same windows. Checkpoints, results and the answers of a run that was ended are kept under --work: the
same command goes on.

    bench_quantized_tasks.py --threads 2 --work FOLDER --json > RESULT.json
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_report
import torch
from bench_report import Report
from kept_pieces import KeptPieces

from llmq.cli import console
from llmq.evals.evaluation import plan_text
from llmq.profiles.checkpoint import find_model
from llmq.runtime.frontend.tokenizer import Tokenizer

LLMQ = Path(sys.executable).with_name("llmq")
METHODS = ("awq", "gptq", "smoothquant", "fp8")
ORIGINAL = "original"
WINDOW = 2048
# The score of each task that is shown.
LIMITS = {"arc_easy": 200, "hellaswag": 200, "lambada_openai": 200, "gsm8k": 50}
SCORES = {"arc_easy": "acc_norm", "hellaswag": "acc_norm", "lambada_openai": "acc", "gsm8k": "exact_match"}


class Checkpoints:
    """The original and what is made of it, each evaluated once by `llmq eval`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work: Path = arguments.work
        self.original = find_model(arguments.model)

    def folder(self, name: str) -> Path:
        """The checkpoint, quantized where it is not there yet."""
        if name == ORIGINAL:
            return self.original
        made = self.work / name
        if not made.is_dir():
            _llmq("quantize", self.original, f"--{name}", "-o", made)
        return made

    def tasks(self, name: str, tasks: list[str], limit: int) -> dict[str, Any]:
        """The saved result of some tasks, compared with the original's."""
        stem = "-".join(tasks)
        options = ["--tasks", ",".join(tasks), "--data-dir", self.arguments.data_dir, "--limit", limit]
        if name != ORIGINAL:
            options += ["--baseline", self._result(ORIGINAL, stem), "--max-drop", self.arguments.max_drop]
        return self._evaluated(name, stem, options)

    def text(self, name: str, dtype: str | None = None) -> dict[str, Any]:
        """The saved result of WikiText-2, the divergence from the original too. None: the dtype of all the others."""
        options = ["--ppl", self.arguments.text, "--window", WINDOW]
        if self.arguments.windows:
            options += ["--limit", self.arguments.windows]
        if name != ORIGINAL:
            options += ["--baseline", self.original]
        return self._evaluated(name, f"text-{dtype}" if dtype else "text", options, dtype)

    def _result(self, name: str, stem: str) -> Path:
        return self.work / f"{name}.{stem}.json"

    def _evaluated(self, name: str, stem: str, options: list[Any], dtype: str | None = None) -> dict[str, Any]:
        saved = self._result(name, stem)
        if not saved.is_file():
            numerics = ["--dtype", dtype or self.arguments.dtype, "--threads", self.arguments.threads]
            _llmq("eval", self.folder(name), *options, *numerics, "-o", saved)
        return json.loads(saved.read_text(encoding="utf-8"))


def _llmq(*arguments: Any) -> None:
    """Runs a verb; 3 says that the items were too few for a verdict, and 1 with a result that it was FAIL."""
    command = [str(LLMQ), *map(str, arguments)]
    console.status(" ".join(command))
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    saved = Path(command[command.index("-o") + 1])
    if not saved.exists():
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def transformers_perplexity(folder: Path, text: str, max_windows: int | None) -> float:
    """exp of the mean NLL of the tokens that `llmq eval` scores, by transformers' forward in float32."""
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_folder(folder)
    encoded, plan = plan_text(tokenizer, text, "WikiText-2", window=WINDOW, max_windows=max_windows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nll = 0.0
    for index in range(len(plan.windows)):
        ids = torch.tensor(plan.prompt(index, encoded.token_ids))
        first = plan.prompt_start(index)
        with torch.inference_mode():
            logits = model(ids[None]).logits[0, first - 1 : -1]
            nll += float(torch.nn.functional.cross_entropy(logits, ids[first:], reduction="sum"))
    return math.exp(nll / plan.num_scored)


def measure(arguments: argparse.Namespace) -> Report:
    torch.set_num_threads(arguments.threads)
    told = ("model", "methods", "limits", "windows", "dtype", "threads", "max_drop", "data_dir", "text")
    kept = KeptPieces(arguments.work, {name: getattr(arguments, name) for name in told})
    checkpoints = Checkpoints(arguments)
    figures: dict[str, Any] = {name: _figures(checkpoints, name) for name in (ORIGINAL, *arguments.methods)}
    text = Path(arguments.text).read_text(encoding="utf-8")
    theirs = kept.get(
        "transformers",
        lambda: {"token_ppl": transformers_perplexity(checkpoints.original, text, arguments.windows or None)},
    )
    ours = checkpoints.text(ORIGINAL, dtype="fp32")["text"]["perplexity"]["token_ppl"]
    figures["parity"] = {
        "token_ppl": ours,
        "transformers_token_ppl": theirs["token_ppl"],
        "relative_difference": ours / theirs["token_ppl"] - 1,
    }
    return _report(arguments, figures)


def _figures(checkpoints: Checkpoints, name: str) -> dict[str, Any]:
    """What is told of one checkpoint."""
    text = checkpoints.text(name)
    told: dict[str, Any] = {"weight_bytes": text["model"]["weight_bytes"], "scores": {}, "comparisons": []}
    told |= {"perplexity": text["text"]["perplexity"], "divergence": text["text"]["divergence"]}
    for limit, tasks in _by_limit(checkpoints.arguments.limits).items():
        result = checkpoints.tasks(name, tasks, limit)
        for score in result["tasks"]["scores"]:
            if score["metric"].partition(",")[0] == SCORES.get(score["task"], score["metric"]):
                told["scores"].setdefault(score["task"], score["value"])
        if result["comparison"] is not None:
            told["comparisons"].append(result["comparison"])
    return told


def _by_limit(limits: dict[str, int]) -> dict[int, list[str]]:
    """Tasks that one `llmq eval` answers: it has one --limit for all of them."""
    together: dict[int, list[str]] = {}
    for task, limit in limits.items():
        together.setdefault(limit, []).append(task)
    return together


def _report(arguments: argparse.Namespace, figures: dict[str, Any]) -> Report:
    tasks = list(arguments.limits)
    rows = []
    for name in (ORIGINAL, *arguments.methods):
        one = figures[name]
        divergence, compared = one["divergence"], [task for c in one["comparisons"] for task in c["tasks"]]
        flips = f"-{sum(t['lost'] for t in compared)} +{sum(t['won'] for t in compared)}" if compared else ""
        rows.append(
            [
                *(name, f"{one['weight_bytes'] / 2**20:.1f}"),
                *(bench_report.percent(one["scores"][task]) for task in tasks),
                *(flips, ", ".join(c["verdict"] for c in one["comparisons"])),
                f"{one['perplexity']['token_ppl']:.3f}",
                f"{divergence['mean_kl']:.4f}" if divergence else "",
                bench_report.percent(divergence["top1_agreement"]) if divergence else "",
            ]
        )
    parity = figures["parity"]
    items = ", ".join(f"{limit} of {task}" for task, limit in arguments.limits.items())
    groups = " and ".join(", ".join(of_limit) for of_limit in _by_limit(arguments.limits).values())
    return Report(
        f"{arguments.model} in {arguments.dtype}; items: {items}",
        [
            *("checkpoint", ">weights, MiB", *(f">{task}" for task in tasks), ">flips", "verdict"),
            *(">WikiText-2 ppl", ">mean KL", ">same top-1"),
        ],
        rows,
        figures,
        [
            f"verdicts: a drop of at most {arguments.max_drop} in {groups}; flips: items lost and won",
            f"perplexity of the original in float32: {parity['token_ppl']:.4f}, transformers' "
            f"{parity['transformers_token_ppl']:.4f} ({parity['relative_difference']:+.1e})",
        ],
    )


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--methods", type=bench_report.names, default=list(METHODS))
    options.add_argument("--limits", type=bench_report.limits, default=LIMITS, help="arc_easy=200,gsm8k=50")
    options.add_argument("--windows", type=int, default=20, help=f"of {WINDOW} tokens of the text; 0: all")
    options.add_argument("--max-drop", default="1%")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--data-dir", default=str(bench_report.shared_path("tasks")))
    options.add_argument("--text", default=str(bench_report.shared_path("text", "wikitext2-raw.test.txt")))
    options.add_argument("--work", type=Path, required=True, help="folder for checkpoints and results")
    options.add_argument("--threads", type=int, default=1)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
