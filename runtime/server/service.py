"""Service: one model served by one engine. What the routes ask: may this call run, and then its answer."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.grammar import GrammarCompiler
from llmq.runtime.frontend.input_processor import (
    DEFAULT_COMPLETION_TOKENS,
    InputProcessor,
    check_range,
)
from llmq.runtime.frontend.structured import grammar_of_response_format, grammar_of_structured_outputs
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineInfo
from llmq.runtime.server.answers import Answer, AnswerHead, TextAnswer
from llmq.runtime.server.callers import Caller
from llmq.runtime.server.chat_answer import ChatAnswer
from llmq.runtime.server.chat_format import ChatFormat
from llmq.runtime.server.chat_schema import ChatRequest, NamedTool
from llmq.runtime.server.engine_client import EngineClient
from llmq.runtime.server.errors import ApiError, unavailable
from llmq.runtime.server.generation import Generation, Prompt
from llmq.runtime.server.metrics import ServerMetrics
from llmq.runtime.server.responses import Json
from llmq.runtime.server.schema import CompletionRequest, GenerationRequest
from llmq.runtime.server.selection import Selection
from llmq.runtime.server.tokenize_schema import DetokenizeRequest, TokenizeRequest

T = TypeVar("T")

# A prompt of more characters (or ids) takes long enough to be worth a thread: /health must answer meanwhile.
_LONG_TEXT = 20_000
ANYBODY = Caller()


@dataclass
class Call:
    """A checked request, ready to run."""

    generation: Generation
    answer: Answer


class Service:
    """Turns requests into calls, and refuses those that cannot run: wrong (400), too many (429), not now (503)."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        info: EngineInfo,
        metrics: ServerMetrics,
        *,
        model_name: str,
        max_queue: int | None = None,
        max_num_seqs: int = 64,
        request_timeout_s: float | None = None,
        sampling_defaults: dict[str, Any] | None = None,
    ) -> None:
        """`sampling_defaults` hold where a request says nothing."""
        self.client = client
        self.tokenizer = tokenizer
        self.info = info
        self.metrics = metrics
        self.model_name = model_name
        self.fingerprint = fingerprint_id(info)
        self.started_s = time.time()
        self.draining = False
        self._running: set[Generation] = set()
        self._input = InputProcessor(tokenizer, info)
        self._chat_format = ChatFormat(tokenizer)
        self._grammars = GrammarCompiler(tokenizer, info.vocab_size, info.eos_token_ids)
        self._sampling_defaults = sampling_defaults or {}
        self._request_timeout_s = request_timeout_s
        self._capacity = None if max_queue is None else max_num_seqs + max_queue

    async def completion(self, request: CompletionRequest, caller: Caller = ANYBODY) -> Call:
        """Raises ApiError."""
        self.check_model(request.model)
        echo, logprobs = bool(request.echo), request.logprobs
        if request.max_tokens == 0 and (request.n or 1) > 1:
            raise ApiError(400, "n must be 1 with max_tokens 0: nothing is generated", param="n")
        # With nothing to generate, the prompt is scored even if nobody asked what the scores are.
        prompt_logprobs = 0 if logprobs is None and request.max_tokens == 0 else logprobs
        try:
            check_range("logprobs", logprobs)
            token_ids = await self._tokenize(self._input.completion_prompts, request.prompt)
            grammar = await self._grammar(request)
            selection = Selection.of(request, len(token_ids))
            prompts = [
                Prompt(
                    ids,
                    self._input.sampling_params(
                        len(ids),
                        max_tokens=request.max_tokens,
                        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
                        logprobs=0 if logprobs is None and selection.chooses else logprobs,
                        prompt_logprobs=prompt_logprobs if echo else None,
                        grammar=grammar,
                        **self._sampling_fields(request),
                    ),
                )
                for ids in token_ids
            ]
            generation = self._generation("cmpl", prompts, request, caller, selection)
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from error
        head = self._head(generation)
        return Call(
            generation, TextAnswer(head, self.tokenizer, echo=echo, logprobs=logprobs is not None, selection=selection)
        )

    async def chat(self, request: ChatRequest, caller: Caller = ANYBODY) -> Call:
        """Raises ApiError."""
        self.check_model(request.model)
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        try:
            check_range("top_logprobs", request.top_logprobs)
            self._chat_format.check(request)
            selection = Selection.of(request, 1)
            encode = partial(self._input.chat_prompt, tools=request.usable_tools or None)
            ids = await self._tokenize(encode, [one.for_template() for one in request.messages])
            grammar = await self._grammar(request, self._chat_format.grammar(request))
            params = self._input.sampling_params(
                len(ids),
                max_tokens=asked,
                param="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
                prompt_param="messages",
                logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                grammar=grammar,
                **self._sampling_fields(request),
            )
            generation = self._generation(
                "chatcmpl", [Prompt(ids, params)], request, caller, selection, self._chat_format.shown
            )
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from error
        is_bound = grammar is not None and (request.forced_functions is not None or not request.usable_tools)
        answer = ChatAnswer(
            self._head(generation),
            self.tokenizer,
            make_parser=self._chat_format.make_parser(request, ids, is_bound=is_bound),
            logprobs=bool(request.logprobs),
            names_calls=not isinstance(request.tool_choice, NamedTool),
        )
        return Call(generation, answer)

    async def tokenize(self, request: TokenizeRequest) -> Json:
        """Raises ApiError."""
        if request.model is not None:
            self.check_model(request.model)
        try:
            if request.messages is None:
                special = request.add_special_tokens is not False
                encode = partial(self._input.text_ids, add_special_tokens=special)
                ids = await self._tokenize(encode, request.prompt)
            else:
                encode = partial(
                    self._input.chat_prompt,
                    tools=request.tools_for_template(),
                    add_generation_prompt=request.add_generation_prompt,
                )
                ids = await self._tokenize(encode, [one.for_template() for one in request.messages])
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from error
        names = None
        if request.return_token_strs:
            names = [self.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in ids]
        return {"count": len(ids), "max_model_len": self.info.max_model_len, "tokens": ids, "token_strs": names}

    async def detokenize(self, request: DetokenizeRequest) -> Json:
        """Raises ApiError."""
        if request.model is not None:
            self.check_model(request.model)
        try:
            return {"prompt": await self._tokenize(self._input.text_of, request.tokens)}
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from error

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for any name but the served one."""
        if name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here, {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """Raises ApiError 503 while nothing new can run: shutting down, or the engine dead or standing still."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if (trouble := self.client.trouble()) is not None:
            raise unavailable(trouble, "engine_unavailable")

    @property
    def num_calls(self) -> int:
        """Calls that are being answered."""
        return len(self._running)

    @property
    def num_sequences(self) -> int:
        """Sequences that run, or wait for something."""
        return sum(generation.num_unfinished for generation in self._running)

    @contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """The call is being answered: a shutdown waits for it, and its sequences take room in the queue."""
        self._running.add(call.generation)
        try:
            yield
        finally:
            self._running.remove(call.generation)

    def _sampling_fields(self, request: GenerationRequest) -> dict[str, Any]:
        """Beams have no use for defaults of sampling."""
        asked = {name: value for name, value in request.sampling_fields().items() if value is not None}
        return asked if request.use_beam_search else self._sampling_defaults | asked

    def _generation(
        self,
        kind: str,
        prompts: Sequence[Prompt],
        request: GenerationRequest,
        caller: Caller,
        selection: Selection,
        shown: frozenset[int] = frozenset(),
    ) -> Generation:
        check_range("priority", request.priority)
        stop = self._input.stop_strings(request.stop)
        self._admit(selection.num_sequences * len(prompts))
        return Generation(
            f"{kind}-{uuid.uuid4().hex}",
            prompts,
            selection.num_generated,
            stop,
            self.tokenizer,
            caller=caller,
            priority=request.priority or 0,
            timeout_s=self._request_timeout_s,
            shown=shown,
            beams=selection.beams,
        )

    def _admit(self, num_sequences: int) -> None:
        self.check_open()
        if self._capacity is not None and self.num_sequences + num_sequences > self._capacity:
            raise ApiError(
                429,
                f"{self.num_sequences} sequences are running or waiting and {num_sequences} more would be over the "
                f"{self._capacity} that the server takes",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": "1"},
            )

    async def _grammar(self, request: GenerationRequest, tools: str | None = None) -> str | None:
        """What the output must follow (`tools`: because of tools), known to be something that the engine can follow."""
        if tools is not None:
            param, grammar = "tools", tools
        elif request.structured_outputs is not None:
            param, asked = "structured_outputs", request.structured_outputs.model_dump(by_alias=True)
            grammar = grammar_of_structured_outputs(asked)
        elif request.response_format is not None:
            param, asked = "response_format", request.response_format.model_dump(by_alias=True)
            grammar = grammar_of_response_format(asked)
        else:
            return None
        if grammar is not None:
            await asyncio.to_thread(self._grammars.check, grammar, param)
        return grammar

    async def _tokenize(self, encode: Callable[[Any], T], source: Any) -> T:
        return await asyncio.to_thread(encode, source) if _num_characters(source) > _LONG_TEXT else encode(source)

    def _head(self, generation: Generation) -> AnswerHead:
        return AnswerHead(generation.call_id, self.model_name, self.fingerprint)


def fingerprint_id(info: EngineInfo) -> str:
    """What decides the numerics, as one short word: equal words, equal arithmetic."""
    facts = msgspec.json.encode(sorted(info.fingerprint.items()))
    return f"llmq-{hashlib.sha256(facts).hexdigest()[:12]}"


def _num_characters(source: Any) -> int:
    if isinstance(source, dict):
        return sum(map(_num_characters, source.values()))
    if isinstance(source, list):
        return sum(map(_num_characters, source))
    return len(source) if isinstance(source, str) else 1
