"""Runs lm-eval tasks on an EngineLM: lm-eval's own prompts and metrics, our engine's scores."""

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from lm_eval.api.model import LM

from llmq.evals.counts import HarnessCounts
from llmq.evals.harness import EngineLM
from llmq.evals.samples import Sample, samples_of
from llmq.evals.tasks import LoadedTasks
from llmq.profiles.errors import InputError

# lm-eval's own defaults, so that few-shot examples are the ones it would draw.
_FEWSHOT_SEED = 1234
_RANDOM_SEED = 0

_STDERR = "_stderr"
_NO_POOL = "DISABLE_MULTIPROC"  # read by lm-eval


@dataclass(frozen=True)
class Score:
    """One metric of one task, or of a group over all of its items.

    `stderr` is lm-eval's bootstrap or analytic standard error, None where it has none.
    """

    task: str
    metric: str  # with its filter where that is not the default: "exact_match,strict-match"
    value: float
    stderr: float | None
    num_items: int
    num_fewshot: int | None  # None: a group whose tasks differ in it
    higher_is_better: bool | None


@dataclass(frozen=True)
class TaskRun:
    scores: list[Score]
    counts: HarnessCounts
    first_token_ids: list[int]
    samples: list[Sample]

    def to_dict(self) -> dict[str, Any]:
        return {
            "scores": [asdict(score) for score in self.scores],
            "counts": self.counts.to_dict(),
            "first_token_ids": self.first_token_ids,
        }


def run_tasks(
    lm: EngineLM,
    loaded: LoadedTasks,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
) -> TaskRun:
    """`limit`: the first so many items of each. `num_fewshot` None: each task's own. Raises InputError where the model
    has no chat template to apply.
    """
    if apply_chat_template and lm.chat_template(True) is None:
        raise InputError("--apply-chat-template: this model has no chat template (chat_template.jinja)")
    for task in loaded.tasks.values():
        lm.overlength.keep_out_of_scores(task)
    results = evaluate_tasks(lm, loaded, limit=limit, num_fewshot=num_fewshot, apply_chat_template=apply_chat_template)
    samples = samples_of(results["samples"], lm.prompt_token_ids)
    return TaskRun(_scores(results, loaded.groups), lm.counts, lm.first_token_ids, samples)


def evaluate_tasks(
    lm: LM,
    loaded: LoadedTasks,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
) -> dict[str, Any]:
    """lm-eval's own results and samples, of any of its models, on the prompts that `run_tasks` makes."""
    import numpy as np
    from lm_eval import evaluator

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for task in loaded.tasks.values():
        if num_fewshot is not None:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        _check_few_shot(task)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    random.seed(_RANDOM_SEED)
    np.random.seed(_FEWSHOT_SEED)
    with _in_this_process():
        return evaluator.evaluate(
            lm,
            {"tasks": loaded.tasks, "groups": loaded.groups},
            limit=limit,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
            bootstrap_iters=1000,
        )


@contextmanager
def _in_this_process() -> Iterator[None]:
    """lm-eval resamples in a pool of forked processes, which it ends by SIGTERM. One that is told so while it starts
    may drop the SystemExit of our handler, for hooks after a fork raise nothing, and is then waited for for ever.
    """
    before = os.environ.get(_NO_POOL)
    os.environ[_NO_POOL] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_POOL]
        else:
            os.environ[_NO_POOL] = before


def _check_few_shot(task: Any) -> None:
    wanted = task.get_config("num_fewshot")
    there = len(task.fewshot_docs()) if wanted else 0
    if wanted and there < wanted:
        raise InputError(
            f"task {task.task_name} puts {wanted} examples before each question and has {there} to draw from: "
            "give --num-fewshot 0, or the split that they come from (train, validation or dev) in --data-dir"
        )


def _scores(results: dict[str, Any], groups: dict[str, Any]) -> list[Score]:
    scores = []
    for task, metrics in results["results"].items():
        members = [t.task_name for t in groups[task].get_all_tasks()] if task in groups else [task]
        for key, value in metrics.items():
            name, _, filter_name = key.partition(",")
            if not filter_name or name.endswith(_STDERR):
                continue
            stderr = metrics.get(f"{name}{_STDERR},{filter_name}")
            scores.append(
                Score(
                    task=task,
                    metric=name if filter_name == "none" else key,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    num_items=sum(results["n-samples"][member]["effective"] for member in members),
                    num_fewshot=results["n-shot"].get(task),
                    higher_is_better=results["higher_is_better"].get(task, {}).get(name),
                )
            )
    return scores
