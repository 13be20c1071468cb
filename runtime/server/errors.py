"""Errors as the OpenAI API words them: {"error": {"message", "type", "param", "code"}}."""

import math
from typing import Any

from fastapi.responses import JSONResponse

from llmq.runtime.frontend.errors import InvalidRequestError


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        # What a message quotes may hold half a surrogate pair, which cannot be written back.
        message, param = (text and text.encode(errors="replace").decode() for text in (message, param))
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = headers

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)

    @classmethod
    def from_invalid(cls, error: InvalidRequestError) -> "ApiError":
        return cls(400, error.message, param=error.param, code=error.code)


def unavailable(message: str, code: str) -> ApiError:
    """503: not now, and not through the caller's fault."""
    return ApiError(503, message, kind="server_error", code=code)


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """429: more comes than can be answered in time. The header has whole seconds."""
    headers = {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", headers=headers)
