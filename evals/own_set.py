"""A user's own evaluation set: a JSONL file, checked line by line, as an lm-eval task.

Two kinds of line, one kind a file. PROMPT is any of "query", "question", "prompt"; GOLD of "gold", "answer", "label".
  multiple choice  {PROMPT: text, "choices": [text, ...], GOLD: index from 0, the right choice's text, or its letter}
  generation       {PROMPT: text, "answer": text}
The prompt goes to the model as written, and each choice is scored as its continuation, joined by one space (however
many the file has there). A generated answer counts when it equals the reference, white space around both taken off.
"""

import hashlib
import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmq.profiles.errors import InputError

PROMPT_KEYS = ("query", "question", "prompt")
GOLD_KEYS = ("gold", "answer", "label")
_MAX_ERRORS_SHOWN = 10

Kind = Literal["multiple_choice", "generate_until"]


class LineError(ValueError):
    """What is wrong with one line."""


@dataclass(frozen=True)
class OwnSet:
    """`items` have the fields prompt, choices, gold (an index) or prompt, answer."""

    name: str
    kind: Kind
    items: list[dict[str, Any]]
    sha256: str


def read_own_set(path: Path) -> OwnSet:
    """Reads and checks every line. Raises InputError naming the line numbers of what is wrong, all kinds at once."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"--data {path}: {error.strerror or error}") from error
    items: list[dict[str, Any]] = []
    kinds: dict[Kind, int] = {}  # kind -> the first line that is of it
    errors: list[str] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            kind, item = _parse_line(line)
        except LineError as error:
            errors.append(f"line {number}: {error}")
            continue
        kinds.setdefault(kind, number)
        items.append(item)
    if len(kinds) == 2 and not errors:
        mc, gen = kinds["multiple_choice"], kinds["generate_until"]
        errors.append(f"line {mc} has choices and line {gen} has none: put each kind into a file of its own")
    if errors:
        more = f"\n  and {len(errors) - _MAX_ERRORS_SHOWN} more" if len(errors) > _MAX_ERRORS_SHOWN else ""
        raise InputError(f"{path} cannot be evaluated:\n  " + "\n  ".join(errors[:_MAX_ERRORS_SHOWN]) + more)
    if not items:
        raise InputError(f"{path} has no item: one JSON object a line is expected")
    return OwnSet(path.stem, next(iter(kinds)), items, hashlib.sha256(data).hexdigest())


def _parse_line(line: bytes) -> tuple[Kind, dict[str, Any]]:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict):
        raise LineError(f"a JSON object is expected, this is {type(fields).__name__}")
    prompt = _one_of(fields, PROMPT_KEYS)
    if not isinstance(prompt, str) or not prompt.strip():
        raise LineError("the prompt is not a text with something in it")
    if "choices" in fields:
        choices = fields["choices"]
        if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise LineError("'choices' is not a list of texts")
        if len(choices) < 2:
            raise LineError(f"'choices' needs two texts or more, this has {len(choices)}")
        choices = [choice.strip() for choice in choices]
        return "multiple_choice", {"prompt": prompt.rstrip(" "), "choices": choices, "gold": _gold(fields, choices)}
    answer = fields.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise LineError("neither 'choices' nor an 'answer' with something in it")
    return "generate_until", {"prompt": prompt, "answer": answer}


def _one_of(fields: dict, keys: tuple[str, ...]) -> Any:
    present = [key for key in keys if key in fields]
    if len(present) != 1:
        names = ", ".join(f"'{key}'" for key in keys)
        raise LineError(f"exactly one of {names} is needed, found {', '.join(present) or 'none'}")
    return fields[present[0]]


def _gold(fields: dict, choices: list[str]) -> int:
    """The right choice's 0-based index, given as such, as the choice's own text, or as a letter (A: the first)."""
    gold = _one_of(fields, GOLD_KEYS)
    if isinstance(gold, str):
        if choices.count(gold.strip()) == 1:
            return choices.index(gold.strip())
        letters = string.ascii_uppercase[: len(choices)]
        if len(gold) == 1 and gold in letters:
            return letters.index(gold)
        raise LineError(f"the right answer {gold!r} is not one of the choices")
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(choices):
        raise LineError(f"the right answer {gold!r} is not an index 0..{len(choices) - 1}, counted from 0")
    return gold


def as_lm_eval_task(own_set: OwnSet, max_gen_tokens: int = 128):
    """An lm-eval ConfigurableTask over the set; few-shot examples come from its other items.

    A generation ends at a line's end, or, where a reference has several lines, at the model's own end.
    """
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    config: dict[str, Any] = {
        "task": own_set.name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(own_set.items)},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": own_set.kind,
        "doc_to_text": "prompt",
        "target_delimiter": " ",
        "metadata": {"version": 1},
    }
    if own_set.kind == "multiple_choice":
        metrics = ["acc", "acc_norm"]
        config |= {"doc_to_choice": "choices", "doc_to_target": "gold"}
    else:
        metrics = ["exact_match"]
        one_line = not any("\n" in item["answer"].strip() for item in own_set.items)
        config |= {
            "doc_to_target": "answer",
            "process_results": _exact_match,
            "generation_kwargs": {
                "until": ["\n"] if one_line else [],
                "max_gen_toks": max_gen_tokens,
                "do_sample": False,
            },
        }
    config["metric_list"] = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics]
    return ConfigurableTask(config=config)


def _exact_match(doc: dict, results: list[str]) -> dict[str, float]:
    return {"exact_match": float(results[0].strip() == doc["answer"].strip())}
