"""Two runs over the same items, task by task and together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.evals.samples import Sample, paired, primary_metric
from llmq.evals.verdict import DEFINITIONS, PairedComparison, Verdict, compare_scores
from llmq.profiles.errors import InputError

ALL = "all tasks"


@dataclass(frozen=True)
class TaskComparison:
    task: str
    metric: str
    scores: PairedComparison


@dataclass(frozen=True)
class Comparison:
    """`tasks` by name; `overall` counts every item once, each by its task's own score."""

    tasks: list[TaskComparison]
    overall: PairedComparison

    def to_dict(self, max_drop: float | None) -> dict[str, Any]:
        content: dict[str, Any] = {
            "tasks": [{"task": one.task, "metric": one.metric, **one.scores.to_dict()} for one in self.tasks],
            "overall": self.overall.to_dict(),
            "definitions": DEFINITIONS,
            "max_drop": max_drop,
            "verdict": None,
        }
        if max_drop is not None:
            verdict = self.overall.verdict(max_drop)
            content["verdict"] = verdict.value
            if verdict is Verdict.NOT_ENOUGH:
                content["items_needed"] = self.overall.items_needed(max_drop)
        return content


def compare_samples(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> Comparison:
    """Raises InputError where the runs are not of the same items, or an item lacks the score that its task counts."""
    pairs = paired(baseline, candidate)
    by_task: dict[str, list[tuple[Sample, Sample]]] = {}
    for pair in pairs:
        by_task.setdefault(pair[0].task, []).append(pair)
    tasks, all_base, all_cand = [], [], []
    for task, of_task in sorted(by_task.items()):
        metric = primary_metric([base for base, _ in of_task])
        base, cand = ([_score(sample, metric) for sample in side] for side in zip(*of_task, strict=True))
        tasks.append(TaskComparison(task, metric, compare_scores(base, cand)))
        all_base += base
        all_cand += cand
    return Comparison(tasks, tasks[0].scores if len(tasks) == 1 else compare_scores(all_base, all_cand))


def _score(sample: Sample, metric: str) -> float:
    if metric not in sample.scores:
        raise InputError(f"task {sample.task}, item {sample.doc_id}: it has no {metric}, which its task's others have")
    return sample.scores[metric]
