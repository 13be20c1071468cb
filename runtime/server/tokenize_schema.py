"""/tokenize and /detokenize, in vLLM's shapes."""

from typing import Any

from pydantic import model_validator

from llmq.runtime.server.chat_schema import ChatMessage, Tool
from llmq.runtime.server.schema import Strict


class TokenizeRequest(Strict):
    """Of a text, or of a conversation as /v1/chat/completions would put it to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools: only with messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: not with messages, whose template writes them")
        return self

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        return [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[int]
