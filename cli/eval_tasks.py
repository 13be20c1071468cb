"""The part of `llmq eval` that runs tasks: on a model and its baseline, durably, compared item by item."""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.cli import console
from llmq.cli.eval_tables import print_comparison, print_tasks, say_suspect_generations
from llmq.profiles.errors import InputError

if TYPE_CHECKING:
    from llmq.evals.answer_log import AnswerLog
    from llmq.evals.evaluation import Subject
    from llmq.evals.numerics import Numerics
    from llmq.evals.samples import Sample
    from llmq.evals.served_subject import ServedSubject
    from llmq.evals.task_run import TaskRun
    from llmq.evals.tasks import LoadedTasks
    from llmq.evals.verdict import Verdict


ON_OVERLENGTH = ("error", "skip", "truncate")


def parse_max_drop(text: str | None) -> float | None:
    """`1%` or `0.01` -> 0.01. Raises InputError."""
    if text is None:
        return None
    if not (matched := re.fullmatch(r"(\d+(?:\.\d+)?) ?(%?)", text.strip())):
        raise InputError(f"--max-drop {text!r}: a share such as 1% or 0.01 is expected")
    value = float(matched.group(1)) / (100 if matched.group(2) else 1)
    if not value < 1:
        raise InputError(f"--max-drop {text}: a share below 1 is expected; for {value:g} per cent write {value:g}%")
    return value


def parse_on_overlength(text: str | None) -> str:
    """Raises InputError for what is none of the three words."""
    if text not in (None, *ON_OVERLENGTH):
        raise InputError(f"--on-overlength {text}: one of {', '.join(ON_OVERLENGTH)}")
    return text or "truncate"


def load_saved(path: Path) -> list["Sample"]:
    from llmq.evals.samples import load_samples

    return load_samples(path)


def task_names(tasks: str | None) -> list[str]:
    return [name.strip() for name in (tasks or "").split(",") if name.strip()]


def numerics_line(subject: "Subject | ServedSubject") -> str:
    return ", ".join(f"{name} {value}" for name, value in subject.engine.info.fingerprint.items())


@dataclass
class TaskOptions:
    """What is asked of the items, and where their answers are kept until all are there."""

    tasks: str | None
    data: Path | None
    data_dir: Path | None
    numerics: "Numerics"
    options: dict[str, Any]
    output: Path | None
    max_drop: float | None = None
    _logs: list["AnswerLog"] = field(default_factory=list)
    _data_sha256: str | None = None
    _loaded: "LoadedTasks | None" = None

    def check(self) -> None:
        """All that can be refused before lm-eval is imported."""
        if self.tasks:
            from llmq.evals.tasks import check_task_names

            check_task_names(task_names(self.tasks))

    def load(self) -> None:
        """Find the tasks and their data. Raises InputError."""
        self._loaded = self._load()

    def _taken(self) -> "LoadedTasks":
        """The tasks, for one run, which changes them."""
        loaded, self._loaded = self._loaded or self._load(), None
        return loaded

    def _load(self) -> "LoadedTasks":
        try:
            import lm_eval  # noqa: F401
        except ImportError as error:
            raise InputError("--tasks and --data need lm-eval: pip install 'llmq-toolkit[eval]'") from error
        from llmq.evals.own_set import read_own_set
        from llmq.evals.own_task import as_lm_eval_task, check_options
        from llmq.evals.tasks import LoadedTasks, load_named_tasks, quiet_libraries

        quiet_libraries()
        wanted = task_names(self.tasks)
        loaded = load_named_tasks(wanted, self.data_dir) if wanted else LoadedTasks()
        if self.data:
            own_set = read_own_set(self.data)
            self._data_sha256 = own_set.sha256
            if own_set.name in loaded.tasks:
                raise InputError(f"--data {self.data} would be called as the task {own_set.name}: rename the file")
            check_options(
                own_set,
                num_fewshot=self.options["num_fewshot"],
                apply_chat_template=self.options["apply_chat_template"],
                max_drop=self.max_drop,
            )
            loaded.tasks[own_set.name] = as_lm_eval_task(own_set)
        if not loaded.tasks:
            raise InputError(f"--tasks {self.tasks!r} names no task")
        return loaded

    def run(self, target: "Path | ServedSubject", role: str) -> tuple[dict[str, Any], "TaskRun"]:
        """(the model described, its run); answers that an interrupted run of the same left are not computed again.

        target: a folder, which an engine is opened for in this process, or what a server serves.
        """
        from llmq.evals.evaluation import Subject
        from llmq.evals.harness import EngineLM
        from llmq.evals.overlength import OnOverlength
        from llmq.evals.task_run import run_tasks

        loaded = self._taken()
        subject = Subject.open(target, self.numerics) if isinstance(target, Path) else target
        described = subject.describe()
        shown = ", ".join(
            f"{name.replace('_', ' ')} {'default' if value is None else value}" for name, value in self.options.items()
        )
        console.status(f"{role}: {described['path']} ({numerics_line(subject)})")
        console.status(f"tasks: {', '.join(loaded.tasks)}; {shown}")
        with (
            self._open_log(role, self._identity(described, loaded)) as answers,
            console.progress() as progress,
        ):
            if len(answers):
                console.status(f"{len(answers):,} answers of an earlier run are in {answers.path}")
            self._logs.append(answers)
            policy = OnOverlength(self.options["on_overlength"])
            lm = EngineLM(subject.engine, subject.tokenizer, progress, answers, policy)
            run = run_tasks(lm, loaded, **{k: v for k, v in self.options.items() if k != "on_overlength"})
        console.status(f"first ids {run.first_token_ids}")
        say_suspect_generations(run)
        return described, run

    def forget_answers(self) -> None:
        """The result is printed and saved: what was kept for a run that goes on is not needed."""
        for log in self._logs:
            log.remove()

    def _identity(self, described: dict[str, Any], loaded: "LoadedTasks") -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "model": {name: value for name, value in described.items() if name != "path"},
            "options": {**self.options, **asdict(self.numerics)},
            "tasks": {name: getattr(task, "VERSION", None) for name, task in sorted(loaded.tasks.items())},
            "data": self._data_sha256,
            "data_dir": str(self.data_dir) if self.data_dir else None,
            "lm_eval": version("lm_eval"),
        }

    def _open_log(self, role: str, identity: dict[str, Any]) -> "AnswerLog":
        from llmq.evals.answer_log import AnswerLog, request_key
        from llmq.profiles.cache import cache_dir

        if self.output is None:
            return AnswerLog.open(cache_dir() / "evals" / f"{request_key(identity)}.answers.jsonl", identity)
        stem = self.output.name.removesuffix(".json")
        return AnswerLog.open(self.output.with_name(f"{stem}.{role}.answers.jsonl"), identity)


def run_and_compare(
    asked: TaskOptions,
    target: "Path | ServedSubject",
    baseline_folder: Path | None,
    saved: list["Sample"] | None,
    max_drop: float | None,
    record: dict[str, Any],
    *,
    is_quiet: bool,
) -> "Verdict | None":
    """Run the tasks, on the baseline too where there is one, and put all that came out into `record`.

    saved: the baseline's items from an earlier run, instead of a folder.
    """
    from llmq.evals.comparison import compare_samples
    from llmq.evals.samples import samples_path, save_samples

    record["model"], run = asked.run(target, "model")
    record["tasks"] = run.to_dict()
    if not is_quiet:
        print_tasks("lm-eval", run)
    if asked.output:
        save_samples(run.samples, samples_path(asked.output))
    baseline_samples = saved
    if baseline_folder is not None:
        record["baseline"], baseline_run = asked.run(baseline_folder, "baseline")
        record["baseline_tasks"] = baseline_run.to_dict()
        baseline_samples = baseline_run.samples
        if not is_quiet:
            print_tasks("lm-eval, the baseline", baseline_run)
        if asked.output:
            save_samples(baseline_samples, samples_path(asked.output.with_name(f"{asked.output.stem}.baseline.json")))
    if baseline_samples is None:
        return None
    comparison = compare_samples(baseline_samples, run.samples)
    record["comparison"] = comparison.to_dict(max_drop)
    if not is_quiet:
        return print_comparison(comparison, max_drop)
    return None if max_drop is None else comparison.overall.verdict(max_drop)
