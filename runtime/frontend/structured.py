"""What a caller's `response_format` or `structured_outputs` asks for, as a grammar."""

from typing import Any

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.grammar import ANY_OBJECT, choice_grammar, json_grammar, regex_grammar

MAX_CHOICES = 1000


def grammar_of_response_format(response_format: dict[str, Any]) -> str | None:
    """OpenAI's field, checked by its schema: `{"type": "text" | "json_object" | "json_schema", "json_schema": …}`."""
    if response_format["type"] == "text":
        return None
    if response_format["type"] == "json_object":
        return json_grammar(ANY_OBJECT)
    declared = response_format["json_schema"]["schema"]
    return _json(ANY_OBJECT if declared is None else declared, "response_format")


def grammar_of_structured_outputs(fields: dict[str, Any]) -> str:
    """vLLM's field: exactly one of `json`, `json_object`, `regex`, `choice`."""
    given = {name: value for name, value in fields.items() if value not in (None, False)}
    if len(given) != 1:
        raise _invalid(f"exactly one of {', '.join(fields)} must be given, got {', '.join(given) or 'none'}")
    kind, value = next(iter(given.items()))
    if kind == "json_object":
        return json_grammar(ANY_OBJECT)
    if kind == "json":
        return _json(value, "structured_outputs")
    if kind == "regex":
        return regex_grammar(value)
    if not 1 <= len(value) <= MAX_CHOICES or "" in value:
        raise _invalid(f"choice must hold 1 to {MAX_CHOICES} texts, none of them empty")
    return choice_grammar(value)


def _json(schema: Any, param: str) -> str:
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param}: a JSON Schema must be an object, got {type(schema).__name__}", param=param)
    try:
        return json_grammar(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param}: not a JSON Schema: {error}", param=param) from error


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {message}", param="structured_outputs")
