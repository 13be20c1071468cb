"""Service: one model served by one engine. What the routes ask: may this call run, and then its answer."""

import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineInfo
from llmq.runtime.server.answers import Answer, AnswerHead
from llmq.runtime.server.callers import Caller
from llmq.runtime.server.chat_schema import ChatRequest
from llmq.runtime.server.engine_client import EngineClient
from llmq.runtime.server.errors import ApiError, unavailable
from llmq.runtime.server.generation import Generation
from llmq.runtime.server.metrics import ServerMetrics
from llmq.runtime.server.request_reader import ReadRequest, RequestReader
from llmq.runtime.server.responses import Json
from llmq.runtime.server.schema import CompletionRequest
from llmq.runtime.server.tokenize_schema import DetokenizeRequest, TokenizeRequest

T = TypeVar("T")
R = TypeVar("R", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)

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
        self._reader = RequestReader(tokenizer, info, sampling_defaults or {})
        self._request_timeout_s = request_timeout_s
        self._max_num_seqs = max_num_seqs
        self._capacity = None if max_queue is None else max_num_seqs + max_queue

    async def completion(self, request: CompletionRequest, caller: Caller = ANYBODY) -> Call:
        """Raises ApiError."""
        return await self._call(self._reader.completion, request, caller)

    async def chat(self, request: ChatRequest, caller: Caller = ANYBODY) -> Call:
        """Raises ApiError."""
        return await self._call(self._reader.chat, request, caller)

    async def tokenize(self, request: TokenizeRequest) -> Json:
        """Raises ApiError."""
        return await self._read(self._reader.tokenize, request)

    async def detokenize(self, request: DetokenizeRequest) -> Json:
        """Raises ApiError."""
        return await self._read(self._reader.detokenize, request)

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
        return sum(generation.num_sequences for generation in self._running)

    @contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """The call is being answered: a shutdown waits for it, and its sequences take room in the queue. Raises
        ApiError 429 where there is none; that is known only now, of calls that came together."""
        self._check_room(call.generation.num_sequences)
        self._running.add(call.generation)
        try:
            yield
        finally:
            self._running.remove(call.generation)

    async def _read(self, read: Callable[[R], Awaitable[T]], request: R) -> T:
        if request.model is not None:
            self.check_model(request.model)
        try:
            return await read(request)
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from error

    async def _call(self, read: Callable[[R], Awaitable[ReadRequest]], request: R, caller: Caller) -> Call:
        made = await self._read(read, request)
        self.check_open()
        self._check_size(made.selection.num_sequences * len(made.prompts))
        generation = Generation(
            f"{made.kind}-{uuid.uuid4().hex}",
            made.prompts,
            made.selection.num_generated,
            made.stop,
            self.tokenizer,
            caller=caller,
            priority=request.priority or 0,
            timeout_s=self._request_timeout_s,
            shown=made.shown,
            beams=made.selection.beams,
        )
        head = AnswerHead(generation.call_id, self.model_name, self.fingerprint)
        return Call(generation, made.make_answer(head))

    def _check_size(self, num_sequences: int) -> None:
        if self._capacity is not None and num_sequences > self._capacity:
            raise ApiError(
                400,
                f"n: {num_sequences} sequences are more than the {self._capacity} that this server takes at all: "
                f"{self._max_num_seqs} that run (--max-num-seqs) and {self._capacity - self._max_num_seqs} that wait "
                "(--max-queue)",
                param="n",
            )

    def _check_room(self, num_sequences: int) -> None:
        if self._capacity is not None and self.num_sequences + num_sequences > self._capacity:
            self.metrics.count_refused(num_sequences)
            raise ApiError(
                429,
                f"{self.num_sequences} sequences are running or waiting and {num_sequences} more would be over the "
                f"{self._capacity} that the server takes",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": "1"},
            )


def fingerprint_id(info: EngineInfo) -> str:
    """What decides the numerics, as one short word: equal words, equal arithmetic."""
    facts = msgspec.json.encode(sorted(info.fingerprint.items()))
    return f"llmq-{hashlib.sha256(facts).hexdigest()[:12]}"
