"""RequestReader: what a request of the API says, checked against the model, as something that can run."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.grammar import GrammarCompiler
from llmq.runtime.frontend.grammar_process import GrammarProcesses
from llmq.runtime.frontend.input_processor import DEFAULT_COMPLETION_TOKENS, InputProcessor, check_range
from llmq.runtime.frontend.structured import (
    CallersGrammar,
    grammar_of_response_format,
    grammar_of_structured_outputs,
)
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineInfo
from llmq.runtime.server.answers import Answer, AnswerHead, TextAnswer
from llmq.runtime.server.chat_answer import ChatAnswer
from llmq.runtime.server.chat_format import ChatFormat
from llmq.runtime.server.chat_schema import ChatRequest, NamedTool
from llmq.runtime.server.generation import Prompt
from llmq.runtime.server.responses import Json
from llmq.runtime.server.schema import CompletionRequest, GenerationRequest
from llmq.runtime.server.selection import Selection
from llmq.runtime.server.tokenize_schema import DetokenizeRequest, TokenizeRequest

T = TypeVar("T")

# A prompt of more characters (or ids) takes long enough to be worth a thread: /health must answer meanwhile.
_LONG_TEXT = 20_000
MAX_CHECKS = 2  # of callers' own grammars at a time: each may compute for a while


@dataclass(frozen=True)
class ReadRequest:
    """A request as the engine will be asked, and how its answer is to look."""

    kind: str  # begins the answer's id
    prompts: list[Prompt]
    selection: Selection
    stop: list[str]
    make_answer: Callable[[AnswerHead], Answer]
    shown: frozenset[int] = frozenset()  # special tokens that are text to the answer


class RequestReader:
    """Every method raises InvalidRequestError for what this model cannot do."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo, sampling_defaults: dict[str, Any]) -> None:
        """`sampling_defaults` hold where a request says nothing."""
        self.grammars = GrammarCompiler(tokenizer, info.vocab_size, info.eos_token_ids)
        self._processes = GrammarProcesses(tokenizer.folder, info.vocab_size, info.eos_token_ids)
        self._checking = asyncio.Semaphore(MAX_CHECKS)
        self._tokenizer = tokenizer
        self._input = InputProcessor(tokenizer, info)
        self._chat_format = ChatFormat(tokenizer)
        self._sampling_defaults = sampling_defaults

    async def completion(self, request: CompletionRequest) -> ReadRequest:
        echo, logprobs = bool(request.echo), request.logprobs
        # With nothing to generate, the prompt is scored even if nobody asked what the scores are.
        prompt_logprobs = 0 if logprobs is None and request.max_tokens == 0 else logprobs
        check_range("logprobs", logprobs)
        token_ids = await _in_thread_if_long(self._input.completion_prompts, request.prompt)
        grammar = await self._grammar(request)
        selection = Selection.of(request, len(token_ids))
        fields = self._sampling_fields(request) | {
            "max_tokens": request.max_tokens,
            "default_max_tokens": DEFAULT_COMPLETION_TOKENS,
            "logprobs": 0 if logprobs is None and selection.chooses else logprobs,
            "prompt_logprobs": prompt_logprobs if echo else None,
            "prompt_logprobs_start": request.prompt_logprobs_start,
            **grammar,
        }
        _check_logprobs_start(fields, min(map(len, token_ids)))
        return ReadRequest(
            kind="cmpl",
            prompts=[Prompt(ids, self._input.sampling_params(len(ids), **fields)) for ids in token_ids],
            selection=selection,
            stop=self._input.stop_strings(request.stop),
            make_answer=partial(
                TextAnswer,
                tokenizer=self._tokenizer,
                echo=echo,
                logprobs=logprobs is not None,
                selection=selection,
                with_token_ids=bool(request.return_token_ids),
            ),
        )

    async def chat(self, request: ChatRequest) -> ReadRequest:
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        check_range("top_logprobs", request.top_logprobs)
        self._chat_format.check(request)
        selection = Selection.of(request, 1)
        encode = partial(self._input.chat_prompt, tools=request.usable_tools or None)
        ids = await _in_thread_if_long(encode, [one.for_template() for one in request.messages])
        grammar = await self._grammar(request, self._chat_format.grammar(request))
        params = self._input.sampling_params(
            len(ids),
            max_tokens=asked,
            param="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
            prompt_param="messages",
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            **grammar,
            **self._sampling_fields(request),
        )
        is_bound = bool(grammar) and (request.forced_functions is not None or not request.usable_tools)
        return ReadRequest(
            kind="chatcmpl",
            prompts=[Prompt(ids, params)],
            selection=selection,
            stop=self._input.stop_strings(request.stop),
            make_answer=partial(
                ChatAnswer,
                tokenizer=self._tokenizer,
                make_parser=self._chat_format.make_parser(request, ids, is_bound=is_bound),
                logprobs=bool(request.logprobs),
                names_calls=not isinstance(request.tool_choice, NamedTool),
            ),
            shown=self._chat_format.shown,
        )

    async def tokenize(self, request: TokenizeRequest) -> Json:
        if request.messages is None:
            encode = partial(self._input.text_ids, add_special_tokens=request.add_special_tokens is not False)
            ids = await _in_thread_if_long(encode, request.prompt)
        else:
            encode = partial(
                self._input.chat_prompt,
                tools=request.tools_for_template(),
                add_generation_prompt=request.add_generation_prompt,
            )
            ids = await _in_thread_if_long(encode, [one.for_template() for one in request.messages])
        names = None
        if request.return_token_strs:
            names = [self._tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in ids]
        return {"count": len(ids), "max_model_len": self._input.max_model_len, "tokens": ids, "token_strs": names}

    async def detokenize(self, request: DetokenizeRequest) -> Json:
        return {"prompt": await _in_thread_if_long(self._input.text_of, request.tokens)}

    def _sampling_fields(self, request: GenerationRequest) -> dict[str, Any]:
        """Beams have no use for defaults of sampling."""
        asked = {name: value for name, value in request.sampling_fields().items() if value is not None}
        return asked if request.use_beam_search else self._sampling_defaults | asked

    async def _grammar(self, request: GenerationRequest, tools: str | None = None) -> dict[str, Any]:
        """What the output must follow (`tools`: because of tools), known to be something that the engine can follow, as
        fields of SamplingParams; none where it is free."""
        if tools is not None:
            param, grammar = "tools", tools
        elif request.structured_outputs is not None:
            param, asked = "structured_outputs", request.structured_outputs.model_dump(by_alias=True)
            grammar = grammar_of_structured_outputs(asked)
        elif request.response_format is not None:
            param, asked = "response_format", request.response_format.model_dump(by_alias=True)
            grammar = grammar_of_response_format(asked)
        else:
            return {}
        if grammar is None:
            return {}
        if isinstance(grammar, CallersGrammar):
            async with self._checking:
                checked = await asyncio.to_thread(self._processes.check, grammar.source, param)
            return {"grammar": checked, "isolate_grammar": True}
        await asyncio.to_thread(self.grammars.check, grammar, param)
        return {"grammar": grammar}


def _check_logprobs_start(fields: dict[str, Any], shortest: int) -> None:
    """`shortest`: tokens of the shortest prompt. Raises InvalidRequestError."""
    start, param = fields["prompt_logprobs_start"], "prompt_logprobs_start"
    if start is None:
        return
    if fields["prompt_logprobs"] is None:
        raise InvalidRequestError(f"{param}: only with echo and logprobs", param=param)
    if not 1 <= start < shortest:
        raise InvalidRequestError(
            f"{param} must be at least 1 and below the prompt's {shortest} tokens, got {start}", param=param
        )


async def _in_thread_if_long(encode: Callable[[Any], T], source: Any) -> T:
    return await asyncio.to_thread(encode, source) if _num_characters(source) > _LONG_TEXT else encode(source)


def _num_characters(source: Any) -> int:
    if isinstance(source, dict):
        return sum(map(_num_characters, source.values()))
    if isinstance(source, list):
        return sum(map(_num_characters, source))
    return len(source) if isinstance(source, str) else 1
