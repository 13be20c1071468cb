"""What a chat completion looks like to the client, whole or in chunks: content, reasoning, tool calls."""

from collections.abc import Callable, Sequence

from llmq.runtime.frontend.chat_parser import ChatDelta, ChatParser, ToolCall
from llmq.runtime.frontend.output_processor import ScoredToken, SequenceDelta
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.server.answers import Answer, AnswerHead
from llmq.runtime.server.generation import Choice
from llmq.runtime.server.responses import Json, chat_logprobs


class _Message:
    """One choice as far as it has come."""

    def __init__(self, parser: ChatParser) -> None:
        self.parser = parser
        self.parsed = ChatDelta()
        self.scored: list[ScoredToken] = []


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: Tokenizer,
        *,
        make_parser: Callable[[], ChatParser],
        logprobs: bool,
        names_calls: bool = True,
    ) -> None:
        """`names_calls`: a choice that ends in calls says so, as it does unless the caller chose the function."""
        super().__init__(head, tokenizer)
        self._make_parser = make_parser
        self._with_logprobs = logprobs
        self._names_calls = names_calls
        self._messages: dict[int, _Message] = {}

    def chunk_choices(self, choice: Choice, delta: SequenceDelta) -> list[Json]:
        entries: list[Json] = []
        if choice.index not in self._messages:
            entries.append({"role": "assistant", "content": ""})
        message = self._message(choice)
        parsed = message.parser.push(delta.text, final=delta.finish_reason is not None)
        num_before = len(entries)
        entries += [{"reasoning_content": parsed.reasoning}] if parsed.reasoning else []
        entries += [{"content": parsed.content}] if parsed.content else []
        for call in parsed.tool_calls:
            entries.append({"tool_calls": [_call(call, arguments="") | {"index": call.index}]})
            entries.append({"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]})
        if delta.scored_tokens and len(entries) == num_before:
            entries.append({"content": ""})  # held back: the log probabilities come as they are made
        chunks = [self._chunk(choice, entry, None) for entry in entries]
        if delta.scored_tokens:
            chunks[num_before] |= {"logprobs": self._logprobs(delta.scored_tokens)}
        if delta.finish_reason is not None:
            chunks.append(self._chunk(choice, {}, self._finish_reason(message, delta.finish_reason)))
        return chunks

    def add(self, choice: Choice, delta: SequenceDelta) -> None:
        message = self._message(choice)
        parsed = message.parser.push(delta.text, final=delta.finish_reason is not None)
        message.parsed.reasoning += parsed.reasoning
        message.parsed.content += parsed.content
        message.parsed.tool_calls += parsed.tool_calls
        message.scored.extend(delta.scored_tokens or ())

    def whole_choices(self, choices: Sequence[Choice]) -> list[Json]:
        return [
            {
                "index": one.index,
                "message": _whole_message(message.parsed),
                "logprobs": self._logprobs(message.scored),
                "finish_reason": self._finish_reason(message, one.output.finish_reason),
            }
            for one in choices
            for message in [self._messages[one.index]]
        ]

    def _message(self, choice: Choice) -> _Message:
        if choice.index not in self._messages:
            self._messages[choice.index] = _Message(self._make_parser())
        return self._messages[choice.index]

    def _finish_reason(self, message: _Message, reason: str) -> str:
        called = message.parser.num_calls > 0 and self._names_calls
        return "tool_calls" if called and reason == "stop" else reason

    def _chunk(self, choice: Choice, delta: Json, finish_reason: str | None) -> Json:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        return chat_logprobs(self._tokenizer, scored) if self._with_logprobs else None


def _whole_message(parsed: ChatDelta) -> Json:
    content = parsed.content or (None if parsed.tool_calls else "")
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [_call(call, call.arguments) for call in parsed.tool_calls]
    return message


def _call(call: ToolCall, arguments: str) -> Json:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
