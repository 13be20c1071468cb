"""A whole server around a FakeEngine in this process, and httpx clients that speak to it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import fake_engine
import httpx
import pytest
from fastapi import FastAPI

from llmq.runtime.config import EngineConfig
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.messages import Abort, AddRequests
from llmq.runtime.request import EngineInfo
from llmq.runtime.server.app import create_app
from llmq.runtime.server.callers import ApiKeys
from llmq.runtime.server.engine_client import EngineClient
from llmq.runtime.server.metrics import ServerMetrics
from llmq.runtime.server.service import Service

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def fake_command() -> list[str]:
    """Starts a FakeEngine in a process of its own."""
    return [sys.executable, fake_engine.__file__]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_json: Path) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tiny_tokenizer_json.read_bytes())
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


class LoopbackClient(EngineClient):
    """The client's own bookkeeping around an engine that runs in this event loop."""

    def __init__(self, engine: fake_engine.FakeEngine, **options) -> None:
        super().__init__(EngineConfig(model="tiny"), **options)
        self._engine = engine

    async def start(self) -> EngineInfo:
        self._on_stats(self._engine.stats())
        self._tasks = [asyncio.create_task(self._step())]
        return self._engine.info

    def _send(self, message) -> None:
        if isinstance(message, AddRequests):
            for request in message.requests:
                self._engine.add_request(request)
        elif isinstance(message, Abort):
            self._engine.abort(message.request_ids)

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(0)
            self._note_progress()
            self._deliver(self._engine.step())
            self._on_stats(self._engine.stats())


@dataclass
class Serving:
    http: httpx.AsyncClient
    service: Service
    engine: fake_engine.FakeEngine
    app: FastAPI

    async def post(self, path: str, **body) -> httpx.Response:
        return await self.http.post(path, json={"model": "tiny", **body})

    async def stream(self, path: str, **body) -> list[dict]:
        """The objects of a stream, which must end with [DONE]."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def serving(tokenizer: Tokenizer) -> Callable:
    """`async with serving(script=…, max_model_len=…, api_keys=…, max_queue=…, folder=…) as s`: a Serving."""

    @asynccontextmanager
    async def start(
        *,
        script=None,
        api_keys=(),
        max_queue=None,
        max_num_seqs=64,
        request_timeout_s=None,
        folder=None,
        vocab_size=512,
        sampling_defaults=None,
        **config,
    ) -> AsyncIterator[Serving]:
        engine = fake_engine.FakeEngine(
            EngineConfig(model="tiny", **config), script or fake_engine.DEFAULT_SCRIPT, vocab_size
        )
        metrics = ServerMetrics()
        client = LoopbackClient(engine, on_stats=metrics.set_engine_stats)
        info = await client.start()
        service = Service(
            client,
            tokenizer if folder is None else Tokenizer.from_folder(folder),
            info,
            metrics,
            model_name="tiny",
            max_queue=max_queue,
            max_num_seqs=max_num_seqs,
            request_timeout_s=request_timeout_s,
            sampling_defaults=sampling_defaults,
        )
        app = create_app(service, api_keys=ApiKeys(api_keys))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            try:
                yield Serving(http, service, engine, app)
            finally:
                await client.stop()

    return start
