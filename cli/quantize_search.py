"""`llmq quantize --target`, `--max-kl`: measure each linear, choose bits, quantize, measure again."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.cli import console, quantize_proof
from llmq.profiles.errors import FailedError

if TYPE_CHECKING:
    from llmq.quantize.bit_allocation import Allocation, Unit
    from llmq.quantize.bit_search import Goal, SearchSpace
    from llmq.quantize.calibration import CalibrationSet
    from llmq.quantize.preflight import Plan
    from llmq.quantize.report import QuantizationReport

# Text that each linear is measured on. Damages add up over linears, so that a sum of many needs few tokens of each.
WINDOW, NUM_WINDOWS = 256, 2
MAX_TRIES = 4
# A result this far below what --max-kl allows is tried again with fewer bits.
NEAR_ENOUGH = 0.85

Run = Callable[["Plan"], "QuantizationReport"]


@dataclass(frozen=True)
class Search:
    """A plan whose linears are still to be given their bits."""

    plan: "Plan"
    space: "SearchSpace"
    goal: "Goal"
    device: str

    def run(self, calibration: "CalibrationSet", run: Run, *, restart: bool = False) -> "QuantizationReport":
        """Measure, choose and quantize until the goal is met. `run`: quantizes a plan. restart: from nothing, whatever
        an interrupted command kept."""
        from llmq.quantize.bit_search import choose

        if restart:
            self._kept_file().unlink(missing_ok=True)
        units = self._units(calibration)
        if self.goal.max_kl is None:
            allocation = choose(self.plan, self.space, units, self.goal)
            return self._finish(run(self._plan(allocation)), self.plan.out, allocation)
        return self._until_near_enough(units, run)

    def _units(self, calibration: "CalibrationSet") -> list["Unit"]:
        """How much each linear costs; kept beside OUT until OUT is there, for a command that goes on."""
        from llmq.quantize.sensitivity import load_units, measure_sensitivity, save_units

        kept, identity = self._kept_file(), self._identity(calibration)
        if (units := load_units(identity, kept)) is not None:
            console.status(f"sensitivity of each linear: as measured before, in {kept}")
            return units
        self._drop_trials()  # of something else
        with console.progress() as progress:
            damage = self._damage()
            units = measure_sensitivity(
                self.plan, self.space.shared, calibration, damage, device=self.device, progress=progress
            )
        save_units(units, identity, kept)
        return units

    def _damage(self):
        from llmq.evals.evaluation import Subject
        from llmq.evals.numerics import Numerics
        from llmq.evals.weight_damage import WeightDamage
        from llmq.profiles.machine import available_memory_bytes
        from llmq.quantize.builtin_text import builtin_text

        source = self.plan.source
        window = min(WINDOW, source.architecture.max_position_embeddings)
        # In 16 bit the rounding of activations drowns what a single linear does.
        fits = 3 * source.total_bytes < available_memory_bytes()
        # Other numbers are put into the weights that torch multiplies with.
        numerics = Numerics(dtype="fp32" if fits else "auto", device=self.device, kernels="torch")
        subject = Subject.open(source.path, numerics, max_model_len=window, max_num_seqs=1, enable_prefix_caching=False)
        token_ids = subject.tokenizer.encode(builtin_text("heldout")[-60_000:], add_special_tokens=False)
        return WeightDamage(subject.engine, token_ids, window=window, num_windows=NUM_WINDOWS)

    def _identity(self, calibration: "CalibrationSet") -> dict[str, Any]:
        import torch

        from llmq.quantize.fingerprint import fingerprint

        return {
            **fingerprint(self.plan, calibration, torch.device(self.device)),
            "candidates": [sorted(shared.schemes) for shared in self.space.shared],
            "measured on": [WINDOW, NUM_WINDOWS],
        }

    def _kept_file(self) -> Path:
        out = self.plan.out.absolute()
        return out.parent / f"{out.name}.sensitivity.json"

    def _plan(self, allocation: "Allocation") -> "Plan":
        from llmq.quantize.bit_search import with_allocation

        return with_allocation(self.plan, self.space, allocation)

    def _until_near_enough(self, units: list["Unit"], run: Run) -> "QuantizationReport":
        """Quantize, measure, and correct what the linears' sum predicted by what came out.

        What was tried stays beside OUT until the search is over, the weights of the best alone: after a kill the same
        command goes on.
        """
        from llmq.quantize.bit_search import choose

        tried: list[_Trial] = []
        correction = 1.0
        for number in range(MAX_TRIES):
            allocation = choose(self.plan, self.space, units, self.goal, correction)
            if any(allocation.num_bytes == other.allocation.num_bytes for other in tried):
                break
            trial = self._try(self._trial_folder(number), allocation, run)
            tried.append(trial)
            console.status(f"{trial.report.bits_per_quantized_weight:.3f} bits a weight: measured KL {trial.kl:.5f}")
            best = self._best(tried)
            for other in tried:
                if other is not best:
                    _keep_report_only(other.folder)
            if NEAR_ENOUGH * self.goal.max_kl <= trial.kl <= self.goal.max_kl:
                break
            correction = trial.kl / max(allocation.damage, 1e-12)
        if best is not None:
            best.folder.replace(self.plan.out.absolute())
        self._drop_trials()
        if best is None:
            raise FailedError(
                f"--max-kl {self.goal.max_kl:g} was not reached in {len(tried)} tries: "
                f"{min(trial.kl for trial in tried):.5f} was the least"
            )
        return self._finish(best.report, self.plan.out, best.allocation)

    def _best(self, tried: list["_Trial"]) -> "_Trial | None":
        within = [trial for trial in tried if trial.kl <= self.goal.max_kl]
        return min(within, key=lambda trial: trial.allocation.num_bytes, default=None)

    def _try(self, folder: Path, allocation: "Allocation", run: Run) -> "_Trial":
        """Quantize into `folder` and measure, or take what an interrupted command left there of the same plan."""
        from llmq.quantize.report_files import write_report

        plan = replace(self._plan(allocation), out=folder)
        report = _report_in(folder, plan)
        if report is None:
            shutil.rmtree(folder, ignore_errors=True)
            report = run(plan)
        if report.proof is None:
            report = replace(report, proof=quantize_proof.measure(self.plan.source.path, folder, self.device))
            write_report(folder, report)
        return _Trial(folder, allocation, report)

    def _trial_folder(self, number: int) -> Path:
        out = self.plan.out.absolute()
        return out.with_name(f".{out.name}.try-{number}")

    def _drop_trials(self) -> None:
        for number in range(MAX_TRIES):
            shutil.rmtree(self._trial_folder(number), ignore_errors=True)

    def _finish(self, report: "QuantizationReport", out: Path, allocation: "Allocation") -> "QuantizationReport":
        """The report with what was searched, in OUT too."""
        from llmq.quantize.report_files import write_report

        searched = {
            "goal": {name: value for name, value in asdict(self.goal).items() if value is not None},
            "predicted_kl": allocation.damage,
            "least_possible_by_prediction": allocation.lower_bound,
            "chosen": [
                {
                    "linears": shared.name,
                    "scheme": choice.label,
                    "bytes": choice.num_bytes,
                    "predicted_kl": choice.damage,
                }
                for shared, choice in zip(self.space.shared, allocation.choices, strict=True)
            ],
        }
        report = replace(report, search=searched)
        write_report(out, report)
        self._kept_file().unlink(missing_ok=True)
        return report


@dataclass(frozen=True)
class _Trial:
    folder: Path
    allocation: "Allocation"
    report: "QuantizationReport"

    @property
    def kl(self) -> float:
        return self.report.proof["mean_kl"]


def _report_in(folder: Path, plan: "Plan") -> "QuantizationReport | None":
    """The report in a folder that was made by `plan`, if there is one."""
    from llmq.quantize.report import REPORT_FILE, QuantizationReport

    path = folder / REPORT_FILE
    if not path.is_file():
        return None
    report = QuantizationReport.from_dict(json.loads(path.read_text(encoding="utf-8")))
    as_planned = {name: scheme.name for name, scheme in plan.schemes.items()}
    return report if {entry.name: entry.scheme for entry in report.linears} == as_planned else None


def _keep_report_only(folder: Path) -> None:
    from llmq.quantize.report import REPORT_FILE

    for path in folder.iterdir():
        if path.is_dir():  # packed weights, of the engine that proved it
            shutil.rmtree(path)
        elif path.name != REPORT_FILE:
            path.unlink()
