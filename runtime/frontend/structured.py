"""What a caller's `response_format` or `structured_outputs` asks for, as a grammar."""

from dataclasses import dataclass
from typing import Any

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.grammar import ANY_OBJECT, check_size, choice_grammar, json_grammar, regex_grammar

MAX_CHOICES, MAX_CHOICE_CHARACTERS = 1000, 2**16


@dataclass(frozen=True)
class CallersGrammar:
    """A grammar in the caller's words: nobody knows how long reading or following it takes."""

    source: str


def grammar_of_response_format(response_format: dict[str, Any]) -> str | None:
    """OpenAI's field, checked by its schema: `{"type": "text" | "json_object" | "json_schema", "json_schema": …}`."""
    if response_format["type"] == "text":
        return None
    if response_format["type"] == "json_object":
        return json_grammar(ANY_OBJECT)
    declared = response_format["json_schema"]["schema"]
    return _json(ANY_OBJECT if declared is None else declared, "response_format")


def grammar_of_structured_outputs(fields: dict[str, Any]) -> str | CallersGrammar:
    """vLLM's field: exactly one of `json`, `json_object`, `regex`, `choice`, `grammar`."""
    given = {name: value for name, value in fields.items() if value not in (None, False)}
    if len(given) != 1:
        raise _invalid(f"exactly one of {', '.join(fields)} must be given, got {', '.join(given) or 'none'}")
    kind, value = next(iter(given.items()))
    try:
        return _grammar_of(kind, value)
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise _invalid(f"{kind} is no valid Unicode text: {error.reason}") from None


def _grammar_of(kind: str, value: Any) -> str | CallersGrammar:
    if kind == "json_object":
        return json_grammar(ANY_OBJECT)
    if kind == "grammar":
        check_size(value, "structured_outputs")
        value.encode()
        return CallersGrammar(value)
    if kind == "json":
        return _json(value, "structured_outputs")
    if kind == "regex":
        return regex_grammar(value)
    if not 1 <= len(value) <= MAX_CHOICES or "" in value:
        raise _invalid(f"choice must hold 1 to {MAX_CHOICES} texts, none of them empty")
    if sum(map(len, value)) > MAX_CHOICE_CHARACTERS:
        raise _invalid(f"choice holds more than {MAX_CHOICE_CHARACTERS} characters")
    return choice_grammar(value)


def _json(schema: Any, param: str) -> str:
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param}: a JSON Schema must be an object, got {type(schema).__name__}", param=param)
    if "x-guidance" in schema:  # llguidance's own: it could make any regular expression of the blanks between tokens
        raise InvalidRequestError(f"{param}: x-guidance is not supported", param=param)
    try:
        return json_grammar(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param}: not a JSON Schema: {error}", param=param) from error


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {message}", param="structured_outputs")
