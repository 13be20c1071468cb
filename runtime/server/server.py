"""The life of `llmq serve`: bind, start the engine, answer, drain, end."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.units import format_bytes, format_count
from llmq.runtime.config import EngineConfig
from llmq.runtime.request import EngineInfo
from llmq.runtime.server.engine_client import ENGINE_COMMAND, EngineClient, EngineDeadError
from llmq.runtime.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from llmq.runtime.server.front import Front
    from llmq.runtime.server.service import Service


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is served; `engine` says how it runs."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_name: str | None = None  # None: the folder's name
    api_keys: list[str] = []
    salt_per_key: bool | None = None  # None: with several keys
    request_timeout_s: float | None = None  # from arrival to the last token; None: no limit
    stall_timeout_s: float | None = 300.0  # of an engine that stands still, until the server ends; None: for ever
    max_queue: int | None = None  # sequences that may wait beyond max_num_seqs; None: no limit
    drain_timeout_s: float = 30.0
    generation_config: Literal["model", "openai"] = "model"  # where sampling defaults come from


def serve(
    config: ServerConfig,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    check_engine: Callable[[EngineInfo], None] | None = None,
) -> int:
    """Serve until a signal, and return the exit code: 0 after a drain, 1 when the engine died or stood still too long.

    SIGTERM and SIGINT stop new requests (503), let the running ones finish for `drain_timeout_s`, then end; a second
    signal, and any while the model still loads, ends at once (128 + its number). Raises InputError where the port or
    the model cannot be had. `check_engine` sees the engine that started before anything is answered: what it raises
    ends the server.
    """
    listener = _bind(config.host, config.port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Server(config, listener, engine_command, check_engine).run())


class _Server:
    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        engine_command: Sequence[str],
        check_engine: Callable[[EngineInfo], None] | None,
    ) -> None:
        self._config = config
        self._check_engine = check_engine
        self._listener = listener
        self._metrics = ServerMetrics()
        self._client = EngineClient(
            config.engine,
            command=engine_command,
            on_stats=self._metrics.set_engine_stats,
            stall_timeout_s=config.stall_timeout_s,
        )
        self._signalled = asyncio.Event()
        self._signal = 0  # the last one
        self._is_hurried = False  # nothing is waited for
        self._has_started = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._serve()
        except EngineDeadError as error:  # it never started
            kind = InputError if error.exit_code == 2 else FailedError
            raise kind(str(error)) from None
        finally:
            # An engine that loads hears nobody.
            await self._client.stop(kill=self._is_hurried or not self._has_started)
            self._listener.close()

    async def _serve(self) -> int:
        loading = asyncio.ensure_future(self._load())
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait({loading, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            self._is_hurried = True
            loading.cancel()
            await asyncio.wait({loading})
            self._say("llmq serve: ended while the model was loading")
            return 128 + self._signal
        info, front = loading.result()
        self._has_started = True
        if self._check_engine is not None:
            self._check_engine(info)
        service = front.service(self._client, info, self._metrics)
        server = front.http_server(service)
        _listen(self._listener)
        answering = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        self._say(_ready_line(service, self._config, self._listener, front.sampling_defaults))
        died = asyncio.ensure_future(self._client.died.wait())
        await asyncio.wait({answering, signalled, died}, return_when=asyncio.FIRST_COMPLETED)
        if self._client.died.is_set():
            self._say(f"llmq serve: {self._client.trouble()}")
        elif signalled.done():
            await self._drain(service, died)
        server.should_exit = True
        server.force_exit = self._is_hurried
        await answering
        if self._is_hurried:
            return 128 + self._signal
        return self._client.exit_code

    async def _load(self) -> "tuple[EngineInfo, Front]":
        """The engine's process is started first: what answers is imported while it loads."""
        return await asyncio.gather(self._client.start(), asyncio.to_thread(_make_front, self._config))

    async def _drain(self, service: "Service", died: asyncio.Future) -> None:
        service.draining = True
        if service.num_calls:
            self._say(
                f"llmq serve: finishing {format_count(service.num_calls, 'request')}, "
                f"at most {self._config.drain_timeout_s:g} s (a second signal ends at once)"
            )
        deadline = asyncio.get_running_loop().time() + self._config.drain_timeout_s
        while service.num_calls and not died.done() and not self._is_hurried:
            if asyncio.get_running_loop().time() > deadline:
                self._say(f"llmq serve: cut off {format_count(service.num_calls, 'request')}")
                self._client.cut_off()
                break
            await asyncio.sleep(0.02)

    def _on_signal(self, number: int) -> None:
        self._is_hurried = self._signalled.is_set()
        self._signal = number
        self._signalled.set()

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _make_front(config: ServerConfig) -> "Front":
    from llmq.runtime.server.front import Front

    return Front(config)


def _ready_line(
    service: "Service", config: ServerConfig, listener: socket.socket, sampling_defaults: dict[str, Any]
) -> str:
    info, engine = service.info, config.engine
    blocks = f"{info.num_blocks} blocks"
    if info.num_kv_groups == 1:
        blocks += f" × {info.block_tokens} = {info.num_blocks * info.block_tokens} tokens"
    else:
        blocks += f" for {info.num_kv_groups} kinds of layers"
    stages = f" in {info.num_stages} stages" if info.num_stages > 1 else ""
    ranks = f"{info.num_ranks} ranks{stages} of " if info.num_ranks > 1 else ""
    host, port = listener.getsockname()[:2]
    parts = [
        f"llmq serve: http://{f'[{host}]' if ':' in host else host}:{port}/v1",
        f"model {service.model_name}",
        f"weights {format_bytes(info.weight_bytes)} on {ranks}{info.device}",
        f"KV-cache {blocks}, {format_bytes(info.kv_cache_bytes)}{' a rank' if ranks else ''}",
        f"at most {format_count(info.max_model_len, 'token')} a request, "
        f"{format_count(engine.max_num_seqs, 'request')} and "
        f"{format_count(engine.max_num_batched_tokens, 'token')} a step",
        f"{service.fingerprint} ({', '.join(f'{name} {value}' for name, value in info.fingerprint.items())})",
    ]
    if info.drafter:
        adapts = "as many as are worth it of " if engine.speculation.adaptive else ""
        parts.append(f"{adapts}{format_count(engine.speculation.num_tokens, 'token')} guessed by {info.drafter}")
    if info.memory is not None:
        parts.append(str(info.memory))
    if info.pace is not None:
        parts.append(
            f"keeps {engine.slo}: a token alone takes {1000 * info.pace.floor_s:.3g} ms, and "
            f"{format_count(info.pace.most_decodes, 'request')} of {info.pace.context} tokens can decode at once"
        )
    parts += info.packages
    if info.packed_weights:
        parts.append(f"packed weights {info.packed_weights}")
    if sampling_defaults:
        listed = ", ".join(f"{name} {value:g}" for name, value in sampling_defaults.items())
        parts.append(f"unless asked otherwise: {listed} (generation_config.json)")
    if service.tokenizer.chat_template is None:
        parts.append("no chat template: /v1/chat/completions answers 400")
    return " · ".join(parts)


def _bind(host: str, port: int) -> socket.socket:
    """Bound, so that nobody else takes the port while the model loads, and not listening: nothing is ready yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def _listen(listener: socket.socket) -> None:
    """From here on connections wait to be answered. Linux finds two programs on one port only now."""
    try:
        listener.listen(1024)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
