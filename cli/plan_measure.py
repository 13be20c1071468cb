"""The part of `llmq plan` that measures: each format made, loaded and proven on this machine by llmq's own verbs."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.cli import console
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.units import format_bytes

if TYPE_CHECKING:
    from llmq.profiles.plan import Lengths

# How `llmq quantize` makes a format; None: the model as it is.
_METHODS: dict[str, list[str] | None] = {
    "bf16": None,
    "fp8": ["--fp8"],
    "int8": ["--smoothquant"],
    "w4": ["--awq"],
}
_CALIBRATED = ("int8", "w4")
_DECIDED = {0: "PASS", 1: "FAIL", 3: "NOT ENOUGH"}


@dataclass
class Row:
    """One format, and what was measured of it so far."""

    weights: str
    model: str
    commands: list[str] = field(default_factory=list)
    weight_bytes: int | None = None
    best_rate: float | None = None
    bench: dict[str, Any] | None = None  # of the best rate
    speed: str = ""  # whether a rate keeps the SLO
    quality: str = ""  # whether it keeps --max-drop
    evaluation: dict[str, Any] | None = None

    @property
    def output_tokens_per_s(self) -> float:
        return self.bench["goodput"]["output_tokens_per_s"] if self.bench and self.best_rate is not None else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "output_tokens_per_s": self.output_tokens_per_s}


@dataclass(frozen=True)
class Measuring:
    """The options of --measure as they were given; None: not."""

    model: str
    slo: str
    lengths: Path | None
    max_drop: str | None
    data: Path | None
    tasks: str | None
    limit: int | None
    duration: float | None
    requests: int | None
    max_rate: float | None
    threads: int | None
    quantize_options: str | None
    work: Path | None

    def check(self, is_asked: bool, weights: str | None) -> None:
        """Raises InputError for options without --measure, formats that it does not make, and a drop of nothing."""
        if is_asked:
            self._formats(weights)
        own = {
            "--max-drop": self.max_drop,
            "--data": self.data,
            "--tasks": self.tasks,
            "--limit": self.limit,
            "--duration": self.duration,
            "--requests": self.requests,
            "--max-rate": self.max_rate,
            "--threads": self.threads,
            "--quantize-options": self.quantize_options,
            "--work": self.work,
        }
        given = [flag for flag, value in own.items() if value is not None]
        if given and not is_asked:
            raise InputError(f"{given[0]} is of what is measured: give --measure with it")
        if self.max_drop is not None and self.data is None and self.tasks is None:
            raise InputError(f"--max-drop {self.max_drop}: of scores on your own set or tasks: give --data or --tasks")

    def run(self, lengths: "Lengths", weights: str | None, result: dict[str, Any], *, is_quiet: bool) -> int:
        """Measure every format, put rows and recommendation into `result`, and return the exit code. After Ctrl-C what
        was measured so far is shown."""
        rows = [self._row(name) for name in self._formats(weights)]
        for row in rows:
            self._check_made(row)
        result["measured"] = []
        try:
            for row in rows:
                result["measured"].append(row)
                self._measure(row, lengths)
        finally:
            result["measured"] = [row.as_dict() for row in rows if row.speed]
            if not is_quiet:
                self._print([row for row in rows if row.speed])
        best = self._best(rows)
        result["recommendation"] = best and best.as_dict()
        is_open = best is None and any("NOT ENOUGH" in (row.speed, row.quality) for row in rows)
        if not is_quiet:
            _print_recommendation(best, rows, is_open)
        return 0 if best is not None else 3 if is_open else 1

    def _formats(self, weights: str | None) -> list[str]:
        names = [one.strip() for one in weights.split(",")] if weights else list(_METHODS)
        if unknown := [one for one in names if one not in _METHODS]:
            raise InputError(f"--weights {unknown[0]}: --measure makes {', '.join(_METHODS)}")
        return names

    def _row(self, name: str) -> Row:
        return Row(name, self.model if _METHODS[name] is None else str(self._folder / f"{self._stem}-{name}"))

    @property
    def _stem(self) -> str:
        return Path(self.model.rstrip("/")).stem

    @property
    def _folder(self) -> Path:
        from llmq.profiles.cache import cache_dir

        return self.work or cache_dir() / "plan"

    def _measure(self, row: Row, lengths: "Lengths") -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        is_original = _METHODS[row.weights] is None
        if not is_original:
            options = self._options(row)
            words = ["quantize", self.model, *options, "--no-proof", "-o", row.model]
            if _is_made(row):
                row.commands.append(shlex.join(["llmq", *words]))
            else:
                # Before the checkpoint appears, so that none is ever there without its own.
                _record(row).write_text(shlex.join(options) + "\n", encoding="utf-8")
                self._llmq(row, *words)
        self._load(row, lengths)
        self._prove(row, is_original=is_original)

    def _options(self, row: Row) -> list[str]:
        """Of `llmq quantize`, all that the checkpoint depends on but the model."""
        own = shlex.split(self.quantize_options or "") if row.weights in _CALIBRATED else []
        return [*_METHODS[row.weights], *own]

    def _check_made(self, row: Row) -> None:
        """Raises FailedError for a checkpoint of an earlier run that is not what this one would make."""
        if _METHODS[row.weights] is None or not _is_made(row):
            return
        if not self._is_ours(row):
            raise FailedError(f"{row.model} is there and not made of {self.model}: another --work, or remove it")
        record, asked = _record(row), shlex.join(self._options(row))
        made = record.read_text(encoding="utf-8").strip() if record.is_file() else None
        if made != asked:
            how = "with options that are not recorded" if made is None else f"by llmq quantize {made}"
            raise FailedError(f"{row.model} was made {how}, not by {asked}: another --work, or remove it")

    def _is_ours(self, row: Row) -> bool:
        from llmq.profiles.checkpoint import find_model
        from llmq.quantize.report import REPORT_FILE

        try:
            report = json.loads((Path(row.model) / REPORT_FILE).read_text(encoding="utf-8"))
            return Path(report["source"]).resolve() == find_model(self.model).resolve()
        except (OSError, ValueError, KeyError):
            return False

    def _load(self, row: Row, lengths: "Lengths") -> None:
        flags = ["--trace", str(self.lengths)] if self.lengths else _fixed(lengths)
        flags += [] if self.threads is None else ["--threads", str(self.threads)]
        flags += [] if self.duration is None else ["--duration", f"{self.duration:g}"]
        flags += [] if self.requests is None else ["--requests", str(self.requests)]
        flags += [] if self.max_rate is None else ["--max-rate", f"{self.max_rate:g}"]
        code, found = self._llmq(row, "bench", row.model, "--sweep", "--slo", self.slo, *flags, reads_json=True)
        row.best_rate = found["best_rate"]
        points = found["points"]
        best = [one for one in points if one["requests_per_s_offered"] == row.best_rate]
        row.bench, row.speed = (best or points)[-1], _DECIDED[code]

    def _prove(self, row: Row, *, is_original: bool) -> None:
        from llmq.profiles.checkpoint import find_model, read_checkpoint

        row.weight_bytes = read_checkpoint(find_model(row.model, keep_blocks=True)).total_bytes
        if is_original:
            row.quality = "original"
            return
        asked = ["--data", str(self.data)] if self.data else ["--tasks", self.tasks] if self.tasks else []
        flags = [*asked, *([] if self.limit is None else ["--limit", str(self.limit)])]
        flags += [] if self.max_drop is None else ["--max-drop", self.max_drop]
        flags += [] if self.threads is None else ["--threads", str(self.threads)]
        code, row.evaluation = self._llmq(row, "eval", row.model, "--baseline", self.model, *flags, reads_json=True)
        row.quality = "not asked" if self.max_drop is None else _DECIDED[code]

    def _llmq(self, row: Row, *words: str, reads_json: bool = False) -> tuple[int, dict[str, Any]]:
        """Run a verb as a user would; its remarks and bars go through. Raises FailedError where it fails."""
        row.commands.append(shlex.join(["llmq", *words]))
        console.status(f"llmq plan: {row.commands[-1]}")
        command = [sys.executable, "-m", "llmq", *words, *(["--json"] if reads_json else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if reads_json and done.returncode in _DECIDED and done.stdout:
            return done.returncode, json.loads(done.stdout)
        if done.returncode or reads_json:
            raise FailedError(f"{row.commands[-1]} ended with exit code {done.returncode}: its message is above")
        return 0, {}

    def _best(self, rows: list[Row]) -> Row | None:
        """That keeps the SLO at the highest rate, and the drop."""
        good = ("PASS", "original", "not asked")
        fitting = [row for row in rows if row.speed == "PASS" and row.quality in good]
        # Rates are what a sweep tells apart, to 5 %; of equal ones the smaller weights leave more for KV.
        return max(fitting, key=lambda row: (row.best_rate, -row.weight_bytes), default=None)

    def _print(self, rows: list[Row]) -> None:
        if not rows:
            return
        console.heading(f"Measured on this machine, {self.slo}")
        columns = [
            "weights",
            ">size",
            ">requests/s",
            ">tokens/s",
            ">p99 TTFT",
            ">p99 TPOT",
            "SLO",
            ">scores",
            ">KL",
            "drop",
        ]
        console.print_table(None, columns, [_cells(row) for row in rows])


def _is_made(row: Row) -> bool:
    return (Path(row.model) / "config.json").exists()


def _record(row: Row) -> Path:
    """Beside a checkpoint that was made here: the options that it was made with."""
    return Path(f"{row.model}.options")


def _fixed(lengths: "Lengths") -> list[str]:
    return ["--prompt-tokens", str(lengths.prompt), "--output-tokens", str(lengths.output)]


def _cells(row: Row) -> list[str]:
    from llmq.cli.bench_output import ms

    def p99(name: str) -> str:
        found = row.bench and row.bench["latency_s"][name]
        return ms(found["p99"]) if found else ""

    return [
        row.weights,
        format_bytes(row.weight_bytes) if row.weight_bytes else "",
        "none" if row.best_rate is None else f"{row.best_rate:.2f}",
        f"{row.output_tokens_per_s:,.1f}",
        p99("ttft"),
        p99("tpot"),
        row.speed,
        *_changes(row),
        row.quality,
    ]


def _changes(row: Row) -> list[str]:
    """How the scores changed, and how far next tokens diverge from the original's, in nats."""
    found = row.evaluation or {}
    scores, text = found.get("comparison"), found.get("text")
    return [
        f"{0.0 - scores['overall']['drop']:+.1%}" if scores else "",
        f"{text['divergence']['mean_kl']:.4f}" if text else "",
    ]


def _print_recommendation(best: Row | None, rows: list[Row], is_open: bool) -> None:
    if is_open:
        console.heading("Not decided: too few requests for the SLO's share (--requests) or too few items (--data).")
        return
    if best is None:
        console.heading("None of them keeps the SLO and the drop: a lower load, a looser SLO, or another machine.")
        return
    original = next((row for row in rows if row.quality == "original" and row.output_tokens_per_s), None)
    more = (
        f", {best.best_rate / original.best_rate:.2f} times the original's" if original and original is not best else ""
    )
    console.heading(
        f"Recommended: {best.weights}, which keeps the SLO at {best.best_rate:.3g} requests/s{more}, with "
        f"{best.output_tokens_per_s:,.1f} tokens/s."
    )
    for command in best.commands:
        console.print_text(f"  {command}")
    console.print_text(f"  {shlex.join(['llmq', 'serve', best.model])}")
