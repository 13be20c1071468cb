"""Each item of an evaluation: what was asked, what came back, how it scored. Saved beside a result, compared later."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmq.evals.result import plain_json, whole_file
from llmq.profiles.errors import InputError

SAMPLES_SCHEMA = "llmq.eval.samples/1"
# The one score of an item that a verdict counts, the first that a task has.
_PRIMARY = ("acc_norm", "acc", "exact_match", "exact_match,flexible-extract", "exact_match,strict-match")

ItemKey = tuple[str, int, str]  # task, number of the item in its data, hash of its content


@dataclass(frozen=True)
class Sample:
    """`scores` are of this item alone. `prompt_token_ids` is what went to the model first for it."""

    task: str
    doc_id: int
    doc_hash: str
    prompt: str
    prompt_token_ids: list[int]
    target: str
    answers: list[Any]
    scores: dict[str, float]

    @property
    def key(self) -> ItemKey:
        return self.task, self.doc_id, self.doc_hash


def samples_of(
    logged: Mapping[str, Sequence[dict[str, Any]]], ids: Mapping[tuple[str, str], list[int]]
) -> list[Sample]:
    """From what lm-eval logs of each task, one entry for each filter, and the ids of each (context, continuation)."""
    found: dict[ItemKey, Sample] = {}
    for task, entries in logged.items():
        for entry in entries:
            if not entry["metrics"]:  # left out for its length
                continue
            prompt, continuation = _first_request(entry["arguments"])
            scores = {
                name if entry["filter"] == "none" else f"{name},{entry['filter']}": float(entry[name])
                for name in entry["metrics"]
                if isinstance(entry.get(name), bool | int | float)
            }
            sample = Sample(
                task=task,
                doc_id=entry["doc_id"],
                doc_hash=entry["doc_hash"][:16],
                prompt=prompt,
                prompt_token_ids=list(ids.get((prompt, continuation), ())),
                target=str(entry["target"]),
                answers=[_plain(answer) for answer in entry["filtered_resps"]],
                scores=scores,
            )
            if sample.key in found:
                found[sample.key].scores.update(scores)
            else:
                found[sample.key] = sample
    return [found[key] for key in sorted(found)]


def save_samples(samples: Iterable[Sample], path: Path) -> None:
    """JSONL, a line for each item after one that says what it is. Written whole or not at all."""
    with whole_file(path) as file:
        for content in ({"schema": SAMPLES_SCHEMA}, *map(asdict, samples)):
            file.write(json.dumps(plain_json(content), ensure_ascii=False) + "\n")


def samples_path(result: Path) -> Path:
    """Where the items of a saved result lie: RESULT.json -> RESULT.samples.jsonl."""
    return result.with_name(f"{result.name.removesuffix('.json')}.samples.jsonl")


def load_samples(path: Path) -> list[Sample]:
    """The items of a saved result, by the path of either. Raises InputError for what holds none."""
    if not path.name.endswith(".jsonl"):
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        path = samples_path(path)
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except OSError as error:
        raise InputError(f"the items of a result are expected in {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSONL: {error}") from None
    if not lines or lines[0].get("schema") != SAMPLES_SCHEMA:
        raise InputError(f"{path} holds no items of llmq eval (schema {SAMPLES_SCHEMA})")
    try:
        return [Sample(**line) for line in lines[1:]]
    except TypeError as error:
        raise InputError(f"{path}: an item is not as llmq eval writes it ({error})") from None


def paired(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """The items of both, in the baseline's order. Raises InputError where they are not the same items."""
    theirs = {sample.key: sample for sample in candidate}
    ours = {sample.key for sample in baseline}
    if missing := [sample for sample in baseline if sample.key not in theirs]:
        raise InputError(_unequal("the baseline", "the candidate", missing, len(baseline), len(candidate)))
    if extra := [sample for sample in candidate if sample.key not in ours]:
        raise InputError(_unequal("the candidate", "the baseline", extra, len(candidate), len(baseline)))
    return [(sample, theirs[sample.key]) for sample in baseline]


def primary_metric(samples: Sequence[Sample]) -> str:
    """The score of a task's items that counts. Raises InputError where they have none."""
    names = list(dict.fromkeys(name for sample in samples for name in sample.scores))
    if not names:
        raise InputError(f"task {samples[0].task}: its items have no score of their own")
    return next((name for name in _PRIMARY if name in names), names[0])


def _unequal(here: str, there: str, missing: Sequence[Sample], num_here: int, num_there: int) -> str:
    first = missing[0]
    return (
        f"the two runs are not of the same items: {here} has {num_here}, {there} has {num_there}, and "
        f"{len(missing)} of {here}'s are not among them (first: task {first.task}, item {first.doc_id}); "
        "run both with the same tasks, data and --limit"
    )


def _first_request(arguments: Any) -> tuple[str, str]:
    """(context, continuation or "") of an item's first request, however this lm-eval logs its arguments."""
    first = next(iter(arguments.values())) if isinstance(arguments, dict) else arguments[0]
    parts = list(first.values()) if isinstance(first, dict) else list(first)
    return str(parts[0]), parts[1] if len(parts) > 1 and isinstance(parts[1], str) else ""


def _plain(answer: Any) -> Any:
    return list(answer) if isinstance(answer, tuple | list) else answer
