"""What a model's chat answers are made of beside text: read off its template, asked for by a request."""

from collections.abc import Callable
from functools import partial

from llmq.runtime.frontend.chat_parser import THINK, ChatParser, ends_in_reasoning, model_reasons
from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.frontend.tool_formats import HERMES, KNOWN, tool_format
from llmq.runtime.server.chat_schema import ChatRequest


class ChatFormat:
    """Of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tools = tool_format(tokenizer)
        self._reasons = model_reasons(tokenizer)
        names = [THINK, "</think>"] if self._reasons else []
        if self._tools is not None:
            names += [self._tools.opening, self._tools.closing or ""]
        marker_ids = {tokenizer.added_token_id(name) for name in names}
        # Markers are text to the parser, also where the tokenizer calls them special.
        self.shown = frozenset(tokenizer.special_token_ids & marker_ids)

    def check(self, request: ChatRequest) -> None:
        """Raises InvalidRequestError for tools that this model cannot be shown, or whose calls could not be read."""
        if not request.usable_tools:
            return
        template = self._tokenizer.chat_template
        if template is not None and not template.knows_tools:
            raise _refused("tools", "this model's chat template knows no tools")
        if self._tools is None:
            raise _refused("tools", f"this model does not write calls in a known format, which are {KNOWN}")
        if request.response_format is not None and request.response_format.type != "text":
            raise _refused("response_format", "not together with tools; leave one away, or use tool_choice none")
        if request.structured_outputs is not None:
            raise _refused("structured_outputs", "not together with tools; leave one away, or use tool_choice none")
        if request.forced_functions is None and self._has_strict(request) and self._tools is not HERMES:
            raise _refused("tools", "strict is kept here only with tool_choice required or a named one")

    def grammar(self, request: ChatRequest) -> str | None:
        """That makes the model call what it must, and call as functions that are `strict` declare."""
        forced = request.forced_functions
        if forced is None and not self._has_strict(request):
            return None
        opening = self._tokenizer.added_token_id(self._tools.opening)
        special = opening if opening in self._tokenizer.special_token_ids else None
        if forced is not None:
            several = request.tool_choice == "required" and request.parallel_tool_calls is not False
            return self._tools.forced_grammar(forced, special, several=several)
        return self._tools.strict_grammar([tool["function"] for tool in request.usable_tools], special)

    def make_parser(
        self, request: ChatRequest, prompt_token_ids: list[int], *, is_bound: bool
    ) -> Callable[[], ChatParser]:
        """`is_bound`: a grammar holds the whole answer, so nothing in it is reasoning."""
        reasons = self._reasons and not is_bound
        return partial(
            ChatParser,
            self._tools if request.usable_tools else None,
            reasons=reasons,
            starts_in_reasoning=reasons and ends_in_reasoning(self._tokenizer, prompt_token_ids),
            one_call=request.parallel_tool_calls is False,
            functions=frozenset(tool["function"]["name"] for tool in request.usable_tools),
        )

    def _has_strict(self, request: ChatRequest) -> bool:
        return any(tool["function"].get("strict") for tool in request.usable_tools)


def _refused(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {why}", param=param)
