"""The HTTP application: routes and the shape of errors. What a route does is in Service."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmq.runtime.server.callers import ApiKeys, Caller
from llmq.runtime.server.chat_schema import ChatRequest
from llmq.runtime.server.errors import ApiError, unavailable
from llmq.runtime.server.page import PAGE_ROUTES, add_page_routes
from llmq.runtime.server.schema import CompletionRequest, GenerationRequest, StreamOptions, explain
from llmq.runtime.server.service import Call, Service
from llmq.runtime.server.streaming import ClientGoneError, EventStreamResponse, collect, events, until_disconnect
from llmq.runtime.server.tokenize_schema import DetokenizeRequest, TokenizeRequest

MAX_BODY_BYTES = 32 * 2**20
OPEN_ROUTES = ("/health", *PAGE_ROUTES)  # answered without a key
CLIENT_CLOSED_REQUEST = 499  # nginx's word; nobody reads it


def create_app(service: Service, *, api_keys: ApiKeys | None = None) -> FastAPI:
    """All routes for one model. With keys every route but /health and the page's files wants
    `Authorization: Bearer KEY`."""
    app = FastAPI(title="llmq", version=version("llmq-toolkit"), docs_url=None, redoc_url=None)
    _add_openai_routes(app, service)
    _add_tokenizer_routes(app, service)
    _add_operator_routes(app, service)
    add_page_routes(app)
    _add_error_handlers(app)
    app.add_middleware(_Guard, api_keys=api_keys or ApiKeys())
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    model_card = {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "llmq",
        "root": service.info.model,  # where it lies on the server's disk, as vLLM tells it
        "max_model_len": service.info.max_model_len,
    }

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_card

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await _answer(service, await service.completion(body, _caller(request)), body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(service, await service.chat(body, _caller(request)), body, request)


def _add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await service.tokenize(body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return await service.detokenize(body)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Forward progress: 503 when the engine is dead, or stands still with work waiting."""
        if (trouble := service.client.trouble()) is not None:
            raise unavailable(trouble, "engine_unavailable")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether new requests are taken."""
        service.check_open()
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def show_version() -> dict[str, Any]:
        return {
            "version": version("llmq-toolkit"),
            "system_fingerprint": service.fingerprint,
            "numerics": service.info.fingerprint,
        }


async def _answer(service: Service, call: Call, body: GenerationRequest, request: Request) -> Response:
    deltas = call.generation.run(service.client, service.metrics)
    if body.stream:
        stream = events(call.generation, deltas, call.answer, body.stream_options or StreamOptions())
        return EventStreamResponse(stream, around=service.running(call))
    try:
        with service.running(call):
            whole = await until_disconnect(request.receive, collect(call.generation, deltas, call.answer))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(whole)


def _caller(request: Request) -> Caller:
    return request.state.caller


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = explain(error)
        return ApiError(400, message, param=param).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Uvicorn logs the traceback: the exception goes on to it after this answer.
        return ApiError(500, "an error of the server, written to its log", kind="server_error").response()


class _Guard:
    """What holds for every route, known or not: the key, and the size of a body."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        caller = self._api_keys.identify(headers.get(b"authorization", b""))
        if caller is None and scope["path"] not in OPEN_ROUTES:
            refusal = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            await refusal.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB")
            return message

        await self._app(scope, receive_limited, send)
