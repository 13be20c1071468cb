"""What answers over HTTP. Its imports and the tokenizer take as long as half of torch's import: they are had while the
engine's process loads, so that nothing else may import this module before that process is started."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from llmq.runtime.frontend.generation_defaults import generation_defaults
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineInfo
from llmq.runtime.server.app import create_app
from llmq.runtime.server.callers import ApiKeys
from llmq.runtime.server.engine_client import EngineClient
from llmq.runtime.server.metrics import ServerMetrics
from llmq.runtime.server.service import Service

if TYPE_CHECKING:
    from llmq.runtime.server.server import ServerConfig

# What a client may take to read the last bytes of its answer after the engine is gone or the drain is over.
LAST_WORDS_S = 5


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: ours let requests finish first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Front:
    """One model's tokenizer and sampling defaults, and the HTTP server over an engine of it."""

    def __init__(self, config: "ServerConfig") -> None:
        """Raises InputError for a tokenizer that cannot be had."""
        self._config = config
        self._tokenizer = Tokenizer.from_folder(config.engine.model)
        is_models = config.generation_config == "model"
        self.sampling_defaults = generation_defaults(config.engine.model) if is_models else {}

    def service(self, client: EngineClient, info: EngineInfo, metrics: ServerMetrics) -> Service:
        config = self._config
        return Service(
            client,
            self._tokenizer,
            info,
            metrics,
            model_name=config.served_model_name or Path(config.engine.model).resolve().name,
            max_queue=config.max_queue,
            max_num_seqs=config.engine.max_num_seqs,
            request_timeout_s=config.request_timeout_s,
            sampling_defaults=self.sampling_defaults,
        )

    def http_server(self, service: Service) -> HttpServer:
        api_keys = ApiKeys(self._config.api_keys, salt_per_key=self._config.salt_per_key)
        return HttpServer(
            uvicorn.Config(
                create_app(service, api_keys=api_keys),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
