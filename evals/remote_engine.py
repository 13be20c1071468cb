"""A running OpenAI-shaped server as an engine: token ids go in, token ids and log probabilities come out.

Prompts are made here, by the served model's tokenizer, and sent as ids, so that what is asked is what an engine in this
process would be asked. Likelihoods are `echo` with `logprobs` and no new token; generations are streamed with
`return_token_ids`, so that stop strings are found here and end the request there.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from llmq.profiles.errors import FailedError, InputError
from llmq.runtime.request import EngineInfo, EngineRequest, RequestOutput, TokenLogprobs
from llmq.runtime.sampling_params import SamplingParams

MAX_CONNECTIONS = 64
_ANSWER_TIMEOUT_S = 600.0  # without a byte
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHERE_SET = ("seed", "min_tokens", "ignore_eos")


class RemoteEngine:
    """`EngineLike` over HTTP. `close` ends what runs and the connections; a context manager that does."""

    def __init__(
        self, url: str, model: str, info: EngineInfo, *, api_key: str | None = None, scores_from: bool = False
    ):
        """`scores_from`: the server knows `prompt_logprobs_start`, by which shared contexts are computed once."""
        self.info = info
        self._model = model
        self._scores_from = scores_from
        self._http = httpx.Client(
            base_url=url,
            headers=authorization(api_key),
            timeout=httpx.Timeout(_ANSWER_TIMEOUT_S, connect=10.0),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            trust_env=False,
        )
        self._pool = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="llmq-eval")
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._aborted: dict[str, threading.Event] = {}

    def __enter__(self) -> "RemoteEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.abort(list(self._aborted))
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def add_request(self, request: EngineRequest) -> None:
        aborted = self._aborted[request.request_id] = threading.Event()
        self._pool.submit(self._answer, request, aborted)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (aborted := self._aborted.pop(request_id, None)) is not None:
                aborted.set()

    def step(self) -> list[RequestOutput]:
        """What has come since the last call; waits for something."""
        outputs = [self._outputs.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                outputs.append(self._outputs.get_nowait())
        return outputs

    def _answer(self, request: EngineRequest, aborted: threading.Event) -> None:
        try:
            if request.sampling_params.max_tokens == 0:
                self._put(aborted, self._scored(request, aborted))
            else:
                self._generate(request, aborted)
        except (httpx.HTTPError, FailedError, ValueError, KeyError, TypeError, IndexError) as error:
            message = str(error) or type(error).__name__
            self._put(aborted, RequestOutput(request_id=request.request_id, finish_reason="error", error=message))

    def _put(self, aborted: threading.Event, output: RequestOutput) -> None:
        if not aborted.is_set():
            self._outputs.put(output)

    def _scored(self, request: EngineRequest, aborted: threading.Event) -> RequestOutput:
        prompt, start = request.prompt_token_ids, request.sampling_params.prompt_logprobs_start
        body = self._body(request) | {"echo": True, "logprobs": 1}
        if self._scores_from:
            body["prompt_logprobs_start"] = start
        while (response := self._http.post("/v1/completions", json=body)).status_code == 429 and not aborted.is_set():
            time.sleep(1)
        _check(response)
        lists = response.json()["choices"][0]["logprobs"]
        if len(lists["token_logprobs"]) != len(prompt):
            raise FailedError(f"{len(prompt)} tokens were to be scored and {len(lists['token_logprobs'])} came back")
        pairs = zip(prompt, lists["token_logprobs"], lists["top_logprobs"], strict=True)
        entries = [_entry(*scored) for scored in list(pairs)[start:]]
        return RequestOutput(request_id=request.request_id, prompt_logprobs=entries, finish_reason="length")

    def _generate(self, request: EngineRequest, aborted: threading.Event) -> None:
        body = self._body(request) | {"stream": True, "return_token_ids": True}
        while not aborted.is_set():
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code == 429:
                    time.sleep(1)
                    continue
                _check(response)
                for choice in _choices(response.iter_lines()):
                    if aborted.is_set():
                        return  # leaving closes the connection, which ends the request there
                    self._put(aborted, _generated(request.request_id, choice))
                return

    def _body(self, request: EngineRequest) -> dict[str, Any]:
        """Everything that a server would otherwise decide by the model's generation_config.json."""
        params: SamplingParams = request.sampling_params
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "max_tokens": params.max_tokens,
            **{name: getattr(params, name) for name in _SAMPLING},
        }
        body |= {name: getattr(params, name) for name in _WHERE_SET if getattr(params, name)}
        if params.stop_token_ids:
            body["stop_token_ids"] = sorted(params.stop_token_ids)
        return body


def authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def check_abilities(url: str, model: str, *, api_key: str | None = None) -> None:
    """Raises InputError naming what the server lacks of what an evaluation needs."""
    ask = {"model": model, "prompt": [5, 6, 7], "temperature": 0}
    lacks = []
    with httpx.Client(base_url=url, headers=authorization(api_key), timeout=120, trust_env=False) as http:
        scored = http.post("/v1/completions", json=ask | {"max_tokens": 0, "echo": True, "logprobs": 1})
        if _length(scored, "logprobs", "token_logprobs") != 3 or _length(scored, "logprobs", "top_logprobs") != 3:
            lacks.append("log probabilities of a prompt of token ids (echo with logprobs and max_tokens 0)")
        generated = http.post("/v1/completions", json=ask | {"max_tokens": 1, "return_token_ids": True})
        if _length(generated, "token_ids") != 1:
            lacks.append("the token ids of an answer (return_token_ids)")
    if lacks:
        raise InputError(f"{url} cannot be evaluated: it does not give {', nor '.join(lacks)}")


def _length(response: httpx.Response, *path: str) -> int | None:
    """Of a list in the first choice; None where it is not there."""
    try:
        found: Any = response.raise_for_status().json()["choices"][0]
        for name in path:
            found = found[name]
        return len(found)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError):
        return None


def _entry(token_id: int, logprob: float, top: dict[str, float]) -> TokenLogprobs:
    """Rank 1 where nothing is likelier; the API does not tell other ranks, 2 stands for them."""
    return TokenLogprobs(token_id, logprob, 1 if max(top.values()) <= logprob else 2, [])


def _generated(request_id: str, choice: dict[str, Any]) -> RequestOutput:
    token_ids, reason = choice["token_ids"], choice["finish_reason"]
    stopped = reason == "stop" and bool(token_ids)
    return RequestOutput(
        request_id=request_id,
        new_token_ids=token_ids,
        finish_reason=reason,
        stop_token_id=token_ids[-1] if stopped else None,
    )


def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        response.read()
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:500]
        raise FailedError(f"the server answered {response.status_code}: {message}")


def _choices(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """The first choice of each event. Raises FailedError where the server broke off."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise FailedError(f"the server broke off: {event['error'].get('message', event['error'])}")
        yield from event["choices"][:1]
