"""The part of `llmq eval` that reads a text: its perplexity, and how far a model is from its baseline on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.cli import console
from llmq.cli.eval_tables import print_text_evaluation
from llmq.cli.eval_tasks import numerics_line

if TYPE_CHECKING:
    from llmq.evals.evaluation import Subject, TextEvaluation
    from llmq.evals.numerics import Numerics
    from llmq.evals.served_subject import ServedSubject

BUILTIN = "builtin"


@dataclass(frozen=True)
class TextOptions:
    """A text, and how it is cut: None is decided by the model."""

    source: str  # a path, or BUILTIN
    text: str
    window: int | None
    stride: int | None
    max_windows: int | None

    @classmethod
    def read(cls, source: str, window: int | None, stride: int | None, max_windows: int | None) -> "TextOptions":
        """Raises InputError for a file that is no text."""
        from llmq.evals.text import read_text
        from llmq.quantize.builtin_text import builtin_text

        text = builtin_text("heldout") if source == BUILTIN else read_text(Path(source))
        return cls(source, text, window, stride, max_windows)

    def run(
        self,
        target: "Path | ServedSubject",
        baseline_folder: Path | None,
        numerics: "Numerics",
        record: dict[str, Any],
        *,
        is_quiet: bool,
    ) -> None:
        """Evaluate, and put what came out and of what into `record`."""
        if isinstance(target, Path):
            plan_options = (self.window, self.stride, self.max_windows)
            (candidate, baseline), evaluation = run_text(
                target, self.text, self.source, baseline_folder, numerics, plan_options
            )
        else:
            candidate, baseline, evaluation = target, None, self._run_served(target)
        record["text"] = evaluation.to_dict()
        record["model"] = candidate.describe()
        record["baseline"] = baseline.describe() if baseline else None
        if not is_quiet:
            sizes = [one.engine.info.weight_bytes or None if one else None for one in (candidate, baseline)]
            print_text_evaluation(evaluation, *sizes)

    def _run_served(self, served: "ServedSubject") -> "TextEvaluation":
        from llmq.evals.evaluation import DEFAULT_WINDOW, evaluate_text, plan_text

        encoded, plan = plan_text(
            served.tokenizer,
            self.text,
            self.source,
            window=self.window or min(DEFAULT_WINDOW, served.engine.info.max_model_len),
            stride=self.stride,
            max_windows=self.max_windows,
        )
        console.status(f"model: {served.url} ({numerics_line(served)})")
        _say_plan(encoded, plan)
        with console.progress() as progress:
            return evaluate_text(served, encoded, plan, progress=progress)


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
    _say_plan(encoded, plan)
    with console.progress() as progress:
        return (candidate, baseline), evaluate_text(candidate, encoded, plan, baseline, progress)


def _say_plan(encoded: Any, plan: Any) -> None:
    console.status(
        f"text: {encoded.source}, {plan.num_tokens:,} of {len(encoded.token_ids):,} tokens, window {plan.window}, "
        f"stride {plan.stride}, {encoded.bos_policy}; first ids {plan.prompt(0, encoded.token_ids)[:8]}"
    )
