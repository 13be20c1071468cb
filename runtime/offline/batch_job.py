"""Runs a batch through an engine of this process: every request means what it means to the server."""

import asyncio
import contextlib
import hashlib
import time
import uuid
from dataclasses import dataclass
from typing import Any

from llmq.profiles.errors import FailedError
from llmq.profiles.progress import Progress, silent
from llmq.runtime.frontend.generation_defaults import generation_defaults
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.offline.batch_file import BatchFile, BatchLine, parse_request
from llmq.runtime.offline.batch_output import BatchOutput
from llmq.runtime.offline.local_engine import LocalEngine, SteppedEngine
from llmq.runtime.server.chat_schema import ChatRequest
from llmq.runtime.server.errors import ApiError
from llmq.runtime.server.metrics import ServerMetrics
from llmq.runtime.server.service import Service
from llmq.runtime.server.streaming import collect


@dataclass
class BatchTotals:
    """What this run did; results of earlier ones are not in it."""

    num_answered: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    duration_s: float = 0.0


class BatchJob:
    def __init__(
        self,
        engine: SteppedEngine,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_num_seqs: int,
        seed: int = 0,
        progress: Progress = silent,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_name = model_name
        # Twice what runs: whoever ends is followed at once, and what waits is not the whole file.
        self._window = 2 * max_num_seqs
        self._seed = seed
        self._progress = progress
        self.totals = BatchTotals()

    def run(self, batch: BatchFile, output: BatchOutput) -> BatchTotals:
        """Compute what `output` lacks, results in the order in which they are ready. Raises FailedError when the
        engine dies: what is written stays, and the same call goes on from there."""
        started_s = time.monotonic()
        try:
            asyncio.run(self._run(batch, output))
        finally:
            self.totals.duration_s = time.monotonic() - started_s
        return self.totals

    async def _run(self, batch: BatchFile, output: BatchOutput) -> None:
        missing = [line for line in batch.lines if line.custom_id not in output.statuses]
        local = LocalEngine(self._engine)
        service = Service(
            local,
            self._tokenizer,
            self._engine.info,
            ServerMetrics(),
            model_name=self._model_name,
            sampling_defaults=generation_defaults(self._tokenizer.folder),
        )
        turns = iter(missing)
        self._progress("answered", 0, len(missing), unit="requests")

        async def work() -> None:
            for line in turns:  # shared: each takes what is next
                status, result = await self._answer(service, batch, line)
                output.append(line.custom_id, status, result)
                done = self.totals.num_answered + self.totals.num_failed
                self._progress("answered", done, len(missing), unit="requests")

        stepping = asyncio.create_task(local.run())
        working = asyncio.gather(*(work() for _ in range(min(self._window, len(missing)))))
        try:
            await asyncio.wait({stepping, working}, return_when=asyncio.FIRST_COMPLETED)
            if stepping.done():
                raise FailedError(f"the engine failed: {stepping.exception()!r}; the same command goes on from here")
            working.result()
        finally:
            for task in (stepping, working):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.gather(stepping, working, return_exceptions=True)

    async def _answer(self, service: Service, batch: BatchFile, line: BatchLine) -> tuple[int, dict[str, Any]]:
        try:
            request = parse_request(batch.read(line))
            if request.seed is None:
                # Of the name, so that a result does not depend on where a run was interrupted.
                request.seed = _seed_of(line.custom_id, self._seed)
            call = await (service.chat(request) if isinstance(request, ChatRequest) else service.completion(request))
            body = await collect(call.generation, call.generation.run(service.client, service.metrics), call.answer)
        except ApiError as error:
            if service.client.trouble() is not None:
                await asyncio.Event().wait()  # not this request's fault, and no result: the job ends
            self.totals.num_failed += 1
            return error.status, _result(line.custom_id, error.status, f"req_{uuid.uuid4().hex}", error.body)
        self._count(body["usage"])
        return 200, _result(line.custom_id, 200, body["id"], body)

    def _count(self, usage: dict[str, Any]) -> None:
        self.totals.num_answered += 1
        self.totals.prompt_tokens += usage["prompt_tokens"]
        self.totals.completion_tokens += usage["completion_tokens"]
        self.totals.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]


def _result(custom_id: str, status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }


def _seed_of(custom_id: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{custom_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") >> 1
