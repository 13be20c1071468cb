"""ChatParser: the text of a chat answer taken apart, as it comes, into reasoning, content and tool calls."""

import re
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.frontend.tool_formats import ToolFormat

THINK, END_THINK = "<think>", "</think>"

# A call without its markers, as small models write it: JSON, in a fence or not, its braces doubled or not (the template
# of Qwen2.5-Coder doubles them in its example).
_BARE_CALL = re.compile(r'(?:```(?:json)?\s*)?\{\{?\s*"name"\s*:\s*"([\w.-]+)"')
_BARE_CALL_BEGUN = re.compile(
    r"`{0,2}|```(?:j|js|jso|json)?\s*|"
    r'(?:```(?:json)?\s*)?\{\{?\s*(?:"(?:n(?:a(?:m(?:e(?:"\s*(?::\s*(?:"[\w.-]*)?)?)?)?)?)?)?)?'
)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*(?:```)?\s*", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    index: int
    call_id: str
    name: str
    arguments: str  # JSON


@dataclass
class ChatDelta:
    """What a piece of text added."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class _State(Enum):
    START = "nothing but blanks so far"
    REASONING = "between the markers of reasoning"
    CONTENT = "text for the reader"
    CALL = "after the marker that begins a call"
    BARE_CALL = "in a call without markers, which is then the whole answer"


class ChatParser:
    """`push` text as it comes, the last with `final`. The result does not depend on how the text was cut.

    Markers come as text. Blanks around reasoning and before calls are dropped, and a call is given out whole. What
    begins like a call and is none is content: nothing is lost.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        *,
        reasons: bool,
        starts_in_reasoning: bool = False,
        one_call: bool = False,
        functions: Collection[str] = (),
    ) -> None:
        """`reasons`: the answer may begin with <think>; `starts_in_reasoning`: the prompt ended with it; `one_call`:
        further calls are dropped; `functions`: a call of one of these that is the whole answer needs no markers."""
        self._tools = tools
        self._functions = functions
        self._reasons = reasons
        self._one_call = one_call
        plain = tools is None and not reasons
        self._state = _State.REASONING if starts_in_reasoning else _State.CONTENT if plain else _State.START
        self._held = ""
        self._trim = starts_in_reasoning  # blanks that come next are dropped
        self.num_calls = 0

    def push(self, text: str, *, final: bool = False) -> ChatDelta:
        self._held += text
        delta = ChatDelta()
        steps = {
            _State.START: self._start,
            _State.REASONING: self._reasoning,
            _State.CONTENT: self._content,
            _State.CALL: self._call,
            _State.BARE_CALL: self._bare_call,
        }
        while steps[self._state](delta, final):
            pass
        return delta

    # Each takes what it can from `_held`, and says whether another state should look at the rest.

    def _start(self, delta: ChatDelta, final: bool) -> bool:
        text = self._held.lstrip()
        if self._reasons and text.startswith(THINK):
            self._held, self._state, self._trim = text[len(THINK) :], _State.REASONING, True
            return True
        if self._tools is not None and self._tools.may_begin_bare and text.startswith("{"):
            self._held, self._state = text, _State.CALL
            return True
        undecided = not text or (self._reasons and THINK.startswith(text))
        if self._functions:
            begun = _BARE_CALL.match(text)
            if begun and begun[1] in self._functions:
                self._state = _State.BARE_CALL
                return True
            undecided = undecided or _BARE_CALL_BEGUN.fullmatch(text) is not None
        if undecided and not final:
            return False
        self._state = _State.CONTENT
        return True

    def _reasoning(self, delta: ChatDelta, final: bool) -> bool:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        before, found, after = self._held.partition(END_THINK)
        if found:
            delta.reasoning += before.rstrip()
            self._held, self._state, self._reasons, self._trim = after, _State.START, False, True
            return True
        certain = self._take_certain(END_THINK, final)
        delta.reasoning += certain.rstrip() if final else certain
        return False

    def _content(self, delta: ChatDelta, final: bool) -> bool:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        if self._tools is None:
            delta.content += self._held
            self._held = ""
            return False
        before, found, after = self._held.partition(self._tools.opening)
        if found:
            delta.content += before.rstrip()
            self._held, self._state = after, _State.CALL
            return True
        delta.content += self._take_certain(self._tools.opening, final)
        return False

    def _call(self, delta: ChatDelta, final: bool) -> bool:
        closing = self._tools.closing
        body, found, after = self._held.partition(closing) if closing else (self._held, "", "")
        if not found and not final:
            return False
        calls = self._tools.parse(body)
        if calls is None:
            bare = self._tools.may_begin_bare and body.startswith("{")
            delta.content += ("" if bare else self._tools.opening) + body + found
        self._add_calls(delta, calls or ())
        self._held, self._state, self._trim = after, _State.CONTENT, calls is not None
        return bool(after)

    def _bare_call(self, delta: ChatDelta, final: bool) -> bool:
        if not final:
            return False
        body = self._held.strip()
        if fenced := _FENCE.fullmatch(body):
            body = fenced[1]
        bodies = [body[1:], body[1:-1]] if body.startswith("{{") else [body]  # the last brace is not always doubled
        calls = next((calls for one in bodies if (calls := self._tools.parse(one)) is not None), None)
        if calls is None or any(name not in self._functions for name, _ in calls):
            self._state = _State.CONTENT
            return True
        self._add_calls(delta, calls)
        self._held, self._state = "", _State.CONTENT
        return False

    def _add_calls(self, delta: ChatDelta, calls: Iterable[tuple[str, str]]) -> None:
        for name, arguments in calls:
            if not (self._one_call and self.num_calls):
                call_id = uuid.uuid4().hex[: self._tools.id_length]
                prefix = "" if self._tools.id_length < 10 else "call_"
                delta.tool_calls.append(ToolCall(self.num_calls, prefix + call_id, name, arguments))
                self.num_calls += 1

    def _take_certain(self, marker: str, final: bool) -> str:
        """The text that cannot belong to `marker` any more, nor be blanks before it."""
        cut = len(self._held)
        if not final:
            lengths = range(min(len(marker) - 1, cut), 0, -1)
            cut -= next((length for length in lengths if marker.startswith(self._held[-length:])), 0)
            cut = len(self._held[:cut].rstrip())
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


def model_reasons(tokenizer: Tokenizer) -> bool:
    """Whether the model's template or vocabulary shows <think>…</think>."""
    template = tokenizer.chat_template
    in_template = template is not None and END_THINK in template.source
    return in_template or tokenizer.added_token_id(THINK) is not None


def ends_in_reasoning(tokenizer: Tokenizer, prompt_token_ids: list[int]) -> bool:
    """Whether a prompt ends with <think>: then the answer begins with what is thought."""
    return tokenizer.decode(prompt_token_ids[-16:], skip_special_tokens=False).rstrip().endswith(THINK)
