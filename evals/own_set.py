"""A user's own evaluation set: a JSONL file, checked line by line.

Four kinds of line, one kind a file. PROMPT is any of "query", "question", "prompt"; GOLD of "gold", "answer", "label".
  multiple choice  {PROMPT: text, "choices": [text, ...], GOLD: index from 0, the right choice's text, or its letter}
  generation       {PROMPT: text, "answer": text}
  conversation     {"messages": [{"role": "user", "content": text}, ...], "answer": text}
  text             {"text": text}, for its perplexity
The prompt goes to the model as written, and each choice is scored as its continuation, joined by one space (however
many the file has there). A conversation goes through the model's chat template and ends with the user's turn.

A line with an answer may also have
  "match"       "exact" (the default): the generated answer equals the reference, white space around both taken off;
                "contains": the reference stands somewhere in it, as written; "regex": the reference, a pattern of
                Python's re, is found in it; "numeric": its last number is the reference, to a millionth
  "stop"        a text or several that end the generation. Without it a line's end does where every line of the file is
                a prompt with an exact answer of one line, and else only the model's own end
  "max_tokens"  most tokens generated: 128 where it is not there
Other fields (an id, a category) are not read.
"""

import hashlib
import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmq.evals.matching import MATCHES, problem_of
from llmq.profiles.errors import InputError

PROMPT_KEYS = ("query", "question", "prompt")
GOLD_KEYS = ("gold", "answer", "label")
DEFAULT_MATCH = "exact"
_OF_ANSWERS = ("match", "stop", "max_tokens")  # what only a line with an answer to generate may have
_ROLES = ("system", "user", "assistant")
_MAX_ERRORS_SHOWN = 10

Kind = Literal["multiple_choice", "generation", "conversation", "text"]
Fields = dict[str, Any]


class LineError(ValueError):
    """What is wrong with one line."""


@dataclass(frozen=True)
class OwnSet:
    """`items` have the fields prompt, choices, gold (an index); or prompt or messages, answer, match, stop (a list,
    None: not given), max_tokens (None: not given); or text."""

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
    if len(kinds) > 1 and not errors:
        first, second = sorted(kinds, key=kinds.get)[:2]
        errors.append(
            f"line {kinds[first]} is of the kind {_shown(first)} and line {kinds[second]} {_shown(second)}: "
            "put each kind into a file of its own"
        )
    if errors:
        more = f"\n  and {len(errors) - _MAX_ERRORS_SHOWN} more" if len(errors) > _MAX_ERRORS_SHOWN else ""
        raise InputError(f"{path} cannot be evaluated:\n  " + "\n  ".join(errors[:_MAX_ERRORS_SHOWN]) + more)
    if not items:
        raise InputError(f"{path} has no item: one JSON object a line is expected")
    return OwnSet(path.stem, next(iter(kinds)), items, hashlib.sha256(data).hexdigest())


def _shown(kind: Kind) -> str:
    return kind.replace("_", " ")


def _parse_line(line: bytes) -> tuple[Kind, Fields]:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict):
        raise LineError(f"a JSON object is expected, this is {type(fields).__name__}")
    if "text" in fields and not any(key in fields for key in (*PROMPT_KEYS, "messages", "choices", "answer")):
        _refuse_fields(fields, _OF_ANSWERS, "an answer, and this line is a text")
        return "text", {"text": _some_text(fields["text"], "'text'")}
    if "messages" in fields:
        _refuse_fields(fields, (*PROMPT_KEYS, "choices"), "a prompt, and this line is a conversation")
        return "conversation", {"messages": _messages(fields["messages"]), **_wanted(fields)}
    prompt = _some_text(_one_of(fields, PROMPT_KEYS), "the prompt")
    if "choices" not in fields:
        return "generation", {"prompt": prompt, **_wanted(fields)}
    _refuse_fields(fields, _OF_ANSWERS, "an answer to generate, and this line has choices")
    choices = fields["choices"]
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise LineError("'choices' is not a list of texts")
    if len(choices) < 2:
        raise LineError(f"'choices' needs two texts or more, this has {len(choices)}")
    choices = [choice.strip() for choice in choices]
    return "multiple_choice", {"prompt": prompt.rstrip(" "), "choices": choices, "gold": _gold(fields, choices)}


def _some_text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise LineError(f"{name} is not a text with something in it")
    return value


def _refuse_fields(fields: Fields, names: tuple[str, ...], belongs_to: str) -> None:
    for name in names:
        if name in fields:
            raise LineError(f"'{name}' belongs to {belongs_to}")


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise LineError('\'messages\' is not a list of {"role": …, "content": …}')
    read = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise LineError(f'message {number} is not {{"role": …, "content": …}} and nothing else')
        if message["role"] not in _ROLES:
            raise LineError(f"message {number}: the role is one of {', '.join(_ROLES)}, not {message['role']!r}")
        read.append({"role": message["role"], "content": _some_text(message["content"], f"message {number}")})
    if read[-1]["role"] != "user":
        raise LineError(f"the last message is the {read[-1]['role']}'s: the model answers a user's")
    return read


def _wanted(fields: Fields) -> Fields:
    """What is generated and when it counts."""
    answer = fields.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise LineError("neither 'choices' nor an 'answer' with something in it")
    match = fields.get("match", DEFAULT_MATCH)
    if match not in MATCHES:
        raise LineError(f"'match' is one of {', '.join(MATCHES)}, not {match!r}")
    if problem := problem_of(match, answer):
        raise LineError(problem)
    stop = fields.get("stop")
    stop = [stop] if isinstance(stop, str) else stop
    if stop is not None and not (isinstance(stop, list) and all(isinstance(one, str) and one for one in stop)):
        raise LineError("'stop' is not a text or a list of texts")
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise LineError(f"'max_tokens' is a whole number of at least 1, not {max_tokens!r}")
    return {"answer": answer, "match": match, "stop": stop, "max_tokens": max_tokens}


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
