"""Items that are longer than the model: cut, left out of the scores, or a reason to stop."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from lm_eval.api.instance import Instance

from llmq.profiles.errors import InputError

_MOST_NAMED = 5


class OnOverlength(StrEnum):
    ERROR = "error"
    SKIP = "skip"
    TRUNCATE = "truncate"  # contexts from the left, as lm-eval does


class Overlength:
    """What becomes of over-long items, and which of them were left out. An item is left out with all its requests."""

    def __init__(self, policy: OnOverlength = OnOverlength.TRUNCATE) -> None:
        self._policy = policy
        self._left_out: set[tuple[str, str]] = set()  # task, content of an item

    def left_out(self, requests: Sequence[Instance], too_long: Mapping[int, int], longest: int) -> set[int]:
        """The indices of `requests` that are not to be computed.

        too_long: index -> tokens, of those that do not fit in `longest`. Raises InputError where the policy is error,
        and where nothing of a task would be left.
        """
        if not too_long or self._policy is OnOverlength.TRUNCATE:
            return set()
        if self._policy is OnOverlength.ERROR:
            raise InputError(_refusal(requests, too_long, longest))
        self._left_out |= {(requests[index].task_name, _content(requests[index].doc)) for index in too_long}
        skipped = {index for index, one in enumerate(requests) if self.is_left_out(one.task_name, one.doc)}
        remaining = {one.task_name for index, one in enumerate(requests) if index not in skipped}
        if emptied := {requests[index].task_name for index in skipped} - remaining:
            raise InputError(
                f"--on-overlength skip leaves nothing of task {min(emptied)}: every item is longer than the "
                f"{longest} tokens that this model takes"
            )
        return skipped

    def is_left_out(self, task: str, doc: Any) -> bool:
        return bool(self._left_out) and (task, _content(doc)) in self._left_out

    def keep_out_of_scores(self, task: Any) -> None:
        """From now on the lm-eval task makes no score of an item that was left out."""
        process_results = task.process_results

        def process(doc: Any, results: list[Any]) -> dict[str, Any]:
            return {} if self.is_left_out(task.task_name, doc) else process_results(doc, results)

        task.process_results = process


def _refusal(requests: Sequence[Instance], too_long: Mapping[int, int], longest: int) -> str:
    items: dict[tuple[str, int], int] = {}
    for index, num_tokens in too_long.items():
        key = (requests[index].task_name, requests[index].doc_id)
        items[key] = max(num_tokens, items.get(key, 0))
    named = [f"{task} {doc_id} ({num_tokens:,} tokens)" for (task, doc_id), num_tokens in items.items()]
    listed = ", ".join(named[:_MOST_NAMED]) + (", …" if len(named) > _MOST_NAMED else "")
    return (
        f"{len(items)} item(s) longer than the {longest:,} tokens that this model takes: {listed}. "
        "--on-overlength truncate cuts their beginnings off, skip leaves them out of the scores"
    )


def _content(doc: Any) -> str:
    return json.dumps(doc, sort_keys=True, default=str)
