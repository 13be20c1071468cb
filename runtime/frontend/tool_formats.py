"""How models write tool calls: recognized by what their chat template shows, parsed, and enforced by grammars."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, StructTag

from llmq.runtime.frontend.tokenizer import Tokenizer

Function = dict[str, Any]  # {"name", "description"?, "parameters"?: a JSON Schema, "strict"?}


@dataclass(frozen=True)
class ToolFormat:
    """A call is a JSON object with the function's name and its arguments; formats differ in what stands around it."""

    name: str
    opening: str  # begins one call, or all of them where there is no `closing`
    closing: str | None = None
    arguments: str = "arguments"  # what the arguments' key is called
    is_list: bool = False  # one JSON list holds all calls
    may_begin_bare: bool = False  # an answer that begins with "{" is a call, without `opening`
    id_length: int = 24  # of a call's id: templates check it

    def parse(self, text: str) -> list[tuple[str, str]] | None:
        """(function, arguments as JSON) of each call in what stood between the markers; None: these are no calls."""
        decoder, calls, position = json.JSONDecoder(), [], 0
        while position < len(text):
            if text[position] in " \n\t\r;,":
                position += 1
                continue
            try:
                value, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                return None
            for item in value if isinstance(value, list) else [value]:
                if (call := _read_call(item)) is None:
                    return None
                calls.append(call)
        return calls or None

    def forced_grammar(self, functions: Sequence[Function], marker_id: int | None, *, several: bool) -> str:
        """At least one call of one of `functions` and nothing else. `marker_id`: of `opening`, where it is a special
        token."""
        marker = self._marker(marker_id)
        call = {"anyOf": [self._call_schema(function) for function in functions]}
        if self.is_list:
            call = {"type": "array", "items": call, "minItems": 1} | ({} if several else {"maxItems": 1})
        begin = "" if self.may_begin_bare else marker if marker_id is not None else json.dumps(marker)
        if self.closing is None:
            return LLMatcher.grammar_from_lark(f"start: {begin} call\ncall: %json {json.dumps(call)}")
        return LLMatcher.grammar_from_lark(
            f"start: block{' (NEWLINE block)*' if several else ''}\n"
            f"block: {begin} NEWLINE call NEWLINE {json.dumps(self.closing)}\n"
            f'NEWLINE: "\\n"\n'
            f"call: %json {json.dumps(call)}"
        )

    def strict_grammar(self, functions: Sequence[Function], marker_id: int | None) -> str:
        """Any text, in which calls follow their functions' schemas."""
        marker = self._marker(marker_id)
        tags = [
            StructTag(
                trigger=marker,
                begin=f'{marker}\n{{"name": {json.dumps(function["name"])}, "{self.arguments}": ',
                grammar=_parameters(function),
                end="}\n" + (self.closing or ""),
            )
            for function in functions
        ]
        return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=marker_id is not None))

    def _marker(self, marker_id: int | None) -> str:
        """`opening` as a grammar has it: its text, or the special token that it is."""
        return self.opening if marker_id is None else f"<[{marker_id}]>"

    def _call_schema(self, function: Function) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: _parameters(function)},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", is_list=True, id_length=9)
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", arguments="parameters", may_begin_bare=True)
KNOWN = "Hermes and Qwen (<tool_call> JSON), Mistral ([TOOL_CALLS] JSON list), Llama 3 (JSON with parameters)"


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The one that the model's chat template shows; None: none that is known, or it knows no tools."""
    template = tokenizer.chat_template
    if template is None or not template.knows_tools:
        return None
    source = template.source
    if "[TOOL_CALLS]" in source:
        return None if "[ARGS]" in source or "[CALL_ID]" in source else MISTRAL
    if "<tool_call>" in source:
        return None if "<function=" in source or "<arg_key>" in source else HERMES
    return LLAMA3 if '"parameters": dictionary' in source or "<|python_tag|>" in source else None


def _read_call(item: Any) -> tuple[str, str] | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON, as some models write it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return (item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _parameters(function: Function) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
