"""A model's chat template: the same Jinja environment as transformers', without transformers."""

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmq.runtime.frontend.errors import InvalidRequestError

Message = dict[str, Any]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda template: datetime.now().strftime(template)
    return environment


class ChatTemplate:
    """`render(messages)` -> the text that the model was trained to see."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens` are the variables `bos_token`, `eos_token` … that templates use."""
        self.source = source
        self._special_tokens = special_tokens
        environment = _environment()
        self._template = environment.from_string(source)
        self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    def render(
        self, messages: list[Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """`tools` as the OpenAI API has them.

        Raises InvalidRequestError with the template's own words when it refuses the conversation."""
        try:
            return self._template.render(
                **self._special_tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def read_chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The template's source: chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
