"""A batch as OpenAI's batch API takes it: one request a line. Indexed first, read line by line when its turn comes."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmq.profiles.errors import InputError
from llmq.runtime.server.chat_schema import ChatRequest
from llmq.runtime.server.errors import ApiError
from llmq.runtime.server.schema import CompletionRequest, explain

_REQUESTS = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}


@dataclass(frozen=True)
class BatchLine:
    """Where a request lies in the file."""

    offset: int
    num_bytes: int
    custom_id: str
    model: str | None  # what its body asks for, where that can be read


@dataclass(frozen=True)
class BatchFile:
    path: Path
    lines: list[BatchLine]
    sha256: str

    @classmethod
    def index(cls, path: Path) -> "BatchFile":
        """Read the file once. Raises InputError where a line cannot be told apart from others: no JSON object, no
        custom_id, or one that came before."""
        lines: list[BatchLine] = []
        numbers: dict[str, int] = {}
        digest = hashlib.sha256()
        offset = 0
        try:
            with open(path, "rb") as file:
                for number, raw in enumerate(file, 1):
                    digest.update(raw)
                    if raw.strip():
                        line = _index_line(f"{path}, line {number}", raw, offset)
                        if line.custom_id in numbers:
                            first = numbers[line.custom_id]
                            raise InputError(
                                f"{path}, line {number}: custom_id {line.custom_id!r} is that of line {first} too"
                            )
                        numbers[line.custom_id] = number
                        lines.append(line)
                    offset += len(raw)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        if not lines:
            raise InputError(f"{path}: there is no request in it")
        return cls(path, lines, digest.hexdigest())

    def read(self, line: BatchLine) -> dict[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(line.offset)
            return json.loads(file.read(line.num_bytes))


def _index_line(where: str, raw: bytes, offset: int) -> BatchLine:
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error})") from None
    custom_id = content.get("custom_id") if isinstance(content, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        raise InputError(f"{where}: a request is an object with a custom_id, a text that names it in the results")
    body = content.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    return BatchLine(offset, len(raw), custom_id, model if isinstance(model, str) else None)


def parse_request(content: dict[str, Any]) -> ChatRequest | CompletionRequest:
    """The request of a line, with the server's own schema. Raises ApiError, as the server would answer."""
    extra = sorted(content.keys() - {"custom_id", "method", "url", "body"})
    if extra:
        raise ApiError(400, f"{extra[0]}: a line has custom_id, method, url and body alone", param=extra[0])
    if content.get("method") != "POST":
        raise ApiError(400, f"method must be 'POST', got {content.get('method')!r}", param="method")
    url, body = content.get("url"), content.get("body")
    if not isinstance(url, str) or url not in _REQUESTS:
        raise ApiError(400, f"url must be one of {', '.join(_REQUESTS)}, got {url!r}", param="url", code="invalid_url")
    try:
        request = _REQUESTS[url].model_validate(body)
    except ValidationError as error:
        message, param = explain(error)
        raise ApiError(400, message, param=param) from None
    if request.stream:
        raise ApiError(400, "stream: a batch answers with whole objects", param="stream")
    return request
