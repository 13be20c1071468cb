"""Chat requests: messages, tools, and what holds for them together."""

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from llmq.runtime.server.schema import GenerationRequest, Strict


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str = Field(description="JSON.")


class ToolCallOfMessage(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Templates want the arguments as an object; what is none stays the text that it is."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class FunctionTool(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatMessage(Strict):
    role: str
    content: str | list[TextPart] | None
    name: str | None = None
    tool_calls: list[ToolCallOfMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None or name in ("role", "content")}
        if data.get("tool_calls") and data.get("role") == "assistant":
            data.setdefault("content", None)
        return data

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls:
            raise ValueError("messages: content may be null only beside an assistant's tool_calls")
        for field, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) is not None and self.role != role:
                raise ValueError(f"messages: {field} goes with the role {role} only")
        return self

    def for_template(self) -> dict[str, Any]:
        """Parts are joined by line breaks; `developer` is the newer word for `system`, which templates know."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for field in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        return message


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; further ones are dropped.")

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if self.tool_choice not in (None, "none") and not names:
            raise ValueError("tool_choice: only with tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: {self.tool_choice.function.name!r} is none of the tools")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: give max_completion_tokens or max_tokens, not two different ones")
        return self

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """As given; none where `tool_choice` forbids them: the model is not shown what it may not call."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def forced_functions(self) -> list[dict[str, Any]] | None:
        """The functions of which one must be called; None: the model may answer with text."""
        functions = [tool["function"] for tool in self.usable_tools]
        if self.tool_choice == "required":
            return functions
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function["name"] == self.tool_choice.function.name]
        return None
