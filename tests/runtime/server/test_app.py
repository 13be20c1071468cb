"""The API's shapes: answers, streams, refusals. The engine is fake, the server whole."""

import asyncio
import json
from collections.abc import Callable

import pytest
from fake_engine import SHED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.server.chat_schema import ChatRequest
from llmq.runtime.server.schema import CompletionRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NOT_A_NUMBER = b'{"model": "tiny", "prompt": "a", "top_p": NaN}'
HALF_A_PAIR = b'{"model": "tiny", "prompt": "a", "\\ud800": 1}'
HI = [{"role": "user", "content": "Hi"}]


def schema_format(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_models_and_version(serving: Callable):
    async def body():
        async with serving() as s:
            models = (await s.http.get("/v1/models")).json()
            assert [card["id"] for card in models["data"]] == ["tiny"]
            assert (await s.http.get("/v1/models/tiny")).json() == models["data"][0]
            missing = await s.http.get("/v1/models/org/other")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
            assert (await s.http.get("/version")).json()["numerics"] == {"dtype": "none"}
            schemas = (await s.http.get("/openapi.json")).json()["components"]["schemas"]
            assert len(schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]) == 4
            assert schemas["ChatRequest"]["additionalProperties"] is False

    run(body())


def test_text_completion(serving: Callable, tokenizer: Tokenizer):
    async def body():
        async with serving() as s:
            answer = (await s.post(TEXT, prompt=[5] * 20, max_tokens=6)).json()
            again = (await s.post(TEXT, prompt=[5] * 20, max_tokens=6)).json()
        assert answer["object"] == "text_completion"
        assert answer["choices"] == [
            {"index": 0, "text": tokenizer.decode(list(range(100, 106))), "logprobs": None, "finish_reason": "length"}
        ]
        assert answer["usage"] == {
            "prompt_tokens": 20,
            "completion_tokens": 6,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}

    run(body())


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_stream_says_what_the_whole_says(serving: Callable, path: str):
    prompt = {"prompt": "ab"} if path == TEXT else {"messages": HI}
    wanted = {"max_tokens": 12, "stop": ["never"], "n": 2, "logprobs": 2 if path == TEXT else True}

    async def body():
        async with serving() as s:
            whole = (await s.post(path, **prompt, **wanted)).json()
            chunks = await s.stream(path, **prompt, **wanted, stream_options={"include_usage": True})
        assert all(chunk["choices"] for chunk in chunks[:-1])
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 24)
        for index in (0, 1):
            entries = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
            choice = whole["choices"][index]
            assert [e["finish_reason"] for e in entries if e["finish_reason"]] == [choice["finish_reason"]]
            if path == TEXT:
                assert "".join(e["text"] for e in entries) == choice["text"]
                for name, values in choice["logprobs"].items():
                    assert [value for e in entries for value in e["logprobs"][name]] == values
            else:
                assert [e["delta"]["role"] for e in entries if "role" in e["delta"]] == ["assistant"]
                assert "".join(e["delta"].get("content", "") for e in entries) == choice["message"]["content"]
                streamed = [one for e in entries if e["logprobs"] for one in e["logprobs"]["content"]]
                assert streamed == choice["logprobs"]["content"]

    run(body())


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_every_chunk_says_how_many_tokens_so_far_when_asked_to(serving: Callable, path: str):
    prompt = {"prompt": "ab"} if path == TEXT else {"messages": HI}
    options = {"include_usage": True, "continuous_usage_stats": True}

    async def body():
        async with serving() as s:
            chunks = await s.stream(path, **prompt, max_tokens=12, ignore_eos=True, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] <= 1
        assert counts[-1] == 12
        assert len(set(counts)) > 6
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}

    run(body())


def test_usage_chunk_comes_only_when_asked_for(serving: Callable):
    async def body():
        async with serving() as s:
            chunks = await s.stream(CHAT, messages=HI, max_tokens=3)
        assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)

    run(body())


def test_prompts_times_n_are_numbered_and_seeded(serving: Callable):
    async def body():
        async with serving() as s:
            answer = (await s.post(TEXT, prompt=["ab", "cd"], n=2, max_tokens=3, seed=9)).json()
            seeds = {
                name.rsplit("-", 1)[1]: seed
                for r in s.engine.added
                for name, seed in [(r.request_id, r.sampling_params.seed), *r.forks]
            }
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert seeds == {"0": 9, "1": 10, "2": 9, "3": 10}
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["prompt_tokens"] == len(s.service.tokenizer.encode("ab")) * 2

    run(body())


def test_stop_string_aborts_in_the_engine(serving: Callable, tokenizer: Tokenizer):
    script = tokenizer.encode("one two three four")
    cut = next(i for i in range(len(script) + 1) if "thre" in tokenizer.decode(script[:i]))

    async def body():
        async with serving(script=script) as s:
            chunks = await s.stream(
                TEXT, prompt="x", max_tokens=200, stop=["thre"], stream_options={"include_usage": True}
            )
            whole = (await s.post(TEXT, prompt="x", max_tokens=200, stop="thre")).json()
            assert len(s.engine.aborted) == 2
            assert not s.engine.has_unfinished_requests
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"] == "one two "
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == cut

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities(serving: Callable, tokenizer: Tokenizer, stream: bool):
    text = "echo é"
    ids = tokenizer.encode(text)

    async def body():
        async with serving() as s:
            wanted = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
            if stream:
                chunks = [chunk["choices"][0] for chunk in await s.stream(TEXT, **wanted)]
            else:
                chunks = (await s.post(TEXT, **wanted)).json()["choices"]
            scored = [r.sampling_params.prompt_logprobs for r in s.engine.added]
        assert scored == [1]  # the prompt is one request, its second sequence a fork
        for index in (0, 1):
            own = [chunk for chunk in chunks if chunk["index"] == index]
            lists = {name: [v for c in own for v in c["logprobs"][name]] for name in own[0]["logprobs"]}
            assert {len(values) for values in lists.values()} == {len(ids) + 2}
            assert "".join(c["text"] for c in own) == text + tokenizer.decode([100, 101])
            assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
            assert lists["token_logprobs"][1:] == [-0.5] * (len(ids) + 1)
            assert all(len(top) == 2 for top in lists["top_logprobs"][1:])  # the likeliest and the chosen one
            assert lists["text_offset"][0] == 0
            assert lists["text_offset"][len(ids)] == len(text)
            assert any(name.startswith("bytes:\\x") for name in lists["tokens"])  # half of é

    run(body())


def test_scores_begin_where_asked(serving: Callable):
    async def body():
        async with serving() as s:
            wanted = {"prompt": [5, 6, 7, 8], "echo": True, "logprobs": 0, "max_tokens": 1}
            lists = (await s.post(TEXT, **wanted, prompt_logprobs_start=3)).json()["choices"][0]["logprobs"]
            assert s.engine.added[0].sampling_params.prompt_logprobs_start == 3
        assert lists["token_logprobs"] == [None, None, None, -0.5, -0.5]
        assert len(lists["tokens"]) == 5

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(serving: Callable, stream: bool):
    async def body():
        async with serving() as s:
            wanted = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True}
            if stream:
                chunks = [chunk["choices"][0] for chunk in await s.stream(TEXT, **wanted)]
            else:
                chunks = (await s.post(TEXT, **wanted)).json()["choices"]
        assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == [100, 101, 102, 103]
        assert all(chunk["prompt_token_ids"] == [5, 6, 7] for chunk in chunks)

    run(body())


def test_scoring_without_generating(serving: Callable, tokenizer: Tokenizer):
    async def body():
        async with serving() as s:
            answer = (await s.post(TEXT, prompt="abc", echo=True, logprobs=0, max_tokens=0)).json()
            refused = await s.post(TEXT, prompt="abc", max_tokens=0)
            metrics = (await s.http.get("/metrics")).text
        # No first token, so no time to it; the end is one all the same.
        assert answer["timings"]["ttft_ms"] is None
        assert answer["timings"]["total_ms"] > 0
        assert "llmq_time_to_first_token_seconds_count 0.0" in metrics
        assert 'llmq_requests_total{finish_reason="length"} 1.0' in metrics
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode("abc"))
        assert answer["usage"]["completion_tokens"] == 0
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")

    run(body())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": "\ud800"}, "prompt"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": [5, 6], "echo": True, "logprobs": 0, "prompt_logprobs_start": 2}, "prompt_logprobs_start"),
        (TEXT, {"prompt": [5, 6], "echo": True, "logprobs": 0, "prompt_logprobs_start": 0}, "prompt_logprobs_start"),
        (TEXT, {"prompt": [5, 6], "logprobs": 0, "prompt_logprobs_start": 1}, "prompt_logprobs_start"),
        (TEXT, {"prompt": "a", "model": 5}, "model"),
        (TEXT, {"prompt": "a", "n": 0}, "n"),
        (TEXT, {"prompt": "a", "n": 129}, "n"),
        (TEXT, {"prompt": ["a"] * 100, "n": 100}, "n"),
        (TEXT, {"prompt": "a", "top_p": 1.5}, "top_p"),
        (TEXT, {"prompt": "a", "top_k": -7}, "top_k"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
        (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (TEXT, {"prompt": "a", "temperature": True}, "temperature"),
        (TEXT, {"prompt": "a", "max_tokens": -3}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 2.5}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        (TEXT, {"prompt": "a", "logprobs": 9999}, "logprobs"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "a", "seed": 10**30}, "seed"),
        (TEXT, {"prompt": "a", "logit_bias": {"512": 5}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"-1": 5}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 5}}, "logit_bias"),
        (TEXT, {"prompt": "a", "stop_token_ids": [151645]}, "stop_token_ids"),
        (TEXT, {"prompt": "a", "stop": ["a"] * 17}, "stop"),
        (TEXT, {"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
        (TEXT, {"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        (TEXT, {"prompt": "a", "best_of": 129}, "best_of"),
        (TEXT, {"prompt": "a", "best_of": 2, "max_tokens": 0, "echo": True}, "best_of"),
        (TEXT, {"prompt": "a", "n": 2, "max_tokens": 0, "echo": True}, "n"),
        (TEXT, {"prompt": "a", "use_beam_search": True, "max_tokens": 0}, "use_beam_search"),
        (CHAT, {"messages": HI, "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "use_beam_search": True, "top_p": 0.5}, "top_p"),
        (TEXT, {"prompt": "a", "use_beam_search": True, "temperature": 1.0}, "temperature"),
        (TEXT, {"prompt": "a", "use_beam_search": True, "stop": "x"}, "stop"),
        (TEXT, {"prompt": "a", "use_beam_search": True, "logprobs": 1}, "logprobs"),
        (TEXT, {"prompt": "a", "use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
        (TEXT, {"prompt": "a", "use_beam_search": True, "beam_width": 33}, "beam_width"),
        (TEXT, {"prompt": "a", "beam_width": 3}, "beam_width"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"messages": HI, "tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": []}]}, "messages"),
        (CHAT, {"messages": HI, "response_format": {"type": "yaml"}}, "response_format"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"messages": HI, "response_format": schema_format({"type": "objct"})}, "response_format"),
        (CHAT, {"messages": HI, "response_format": schema_format({"not": {"type": "null"}})}, "response_format"),
        (CHAT, {"messages": HI, "response_format": schema_format({"$ref": "http://a.b/c"})}, "response_format"),
        (TEXT, {"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "a("}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"grammar": "start: / +/ / +/ / +/"}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"grammar": "\ud800"}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"grammar": "root ::= " + "x" * 2**21}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "\ud800"}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"choice": ["x" * 99_999]}}, "structured_outputs"),
        (TEXT, {"prompt": "a", "structured_outputs": {"json": {"x-guidance": {}}}}, "structured_outputs"),
        (
            TEXT,
            {"prompt": "a", "structured_outputs": {"grammar": 'start: "a"'}, "use_beam_search": True},
            "structured_outputs",
        ),
        (
            TEXT,
            {"prompt": "a", "structured_outputs": {"json": {"minLength": 3, "maxLength": 2, "type": "string"}}},
            "structured_outputs",
        ),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "a"}, "min_tokens": 2, "max_tokens": 5}, "min_tokens"),
        (
            TEXT,
            {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            "structured_outputs",
        ),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": HI, "max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        (CHAT, {"messages": HI, "echo": True}, "echo"),
    ],
)
def test_a_wrong_field_is_named(serving: Callable, path: str, body: dict, param: str):
    async def check():
        async with serving() as s:
            content = json.dumps({"model": "tiny", **body})
            response = await s.http.post(path, content=content, headers={"content-type": "application/json"})
            assert not s.engine.added
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert param in error["message"]

    run(check())


@pytest.mark.parametrize(
    "field",
    [
        {"tools": None},
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"best_of": 1},
        {"suffix": ""},
        {"store": False},
        {"stop": None},
        {"logit_bias": None},
        {"stream": False},
        {"user": "u"},
    ],
)
def test_a_field_that_asks_for_nothing_is_taken(serving: Callable, field: dict):
    async def body():
        async with serving() as s:
            assert (await s.post(CHAT, messages=HI, max_tokens=1, **field)).status_code == 200

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status"), [(63, 1, 200), (64, 1, 400), (600, 1, 400), (40, 60, 400)]
)
def test_context_length_is_one_check_for_both_modes(serving: Callable, stream, num_prompt, max_tokens, status):
    async def body():
        async with serving(max_model_len=64) as s:
            response = await s.post(TEXT, prompt=[5] * num_prompt, max_tokens=max_tokens, stream=stream)
        assert response.status_code == status
        if status == 400:
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert all(str(number) in error["message"] for number in (64, num_prompt, max_tokens))

    run(body())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"model": NaN}', HALF_A_PAIR]
)
def test_a_body_that_is_no_request_is_refused(serving: Callable, content: bytes):
    async def body():
        async with serving() as s:
            for headers in ({"content-type": "application/json"}, {}):
                response = await s.http.post(TEXT, content=content, headers=headers)
                assert response.status_code == 400
                assert response.json()["error"]["message"]

    run(body())


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = sorted(set(ChatRequest.model_fields) | set(CompletionRequest.model_fields) | {"tools", "best_of", "x"})


@given(path=st.sampled_from([TEXT, CHAT]), changes=st.dictionaries(st.sampled_from(_FIELDS), _ANYTHING, max_size=3))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_is_a_server_error(serving: Callable, path: str, changes: dict):
    async def body():
        async with serving() as s:
            start = {"model": "tiny", "max_tokens": 2} | ({"prompt": "a"} if path == TEXT else {"messages": HI})
            content = json.dumps(start | changes)
            response = await s.http.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (response.status_code, response.text)
            assert not s.engine.has_unfinished_requests

    run(body())


def test_a_huge_body_is_cut_off(serving: Callable):
    async def body():
        async with serving() as s:
            content = b'{"prompt": "' + b"a" * (33 * 2**20) + b'"}'
            response = await s.http.post(TEXT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert "32 MiB" in response.json()["error"]["message"]

    run(body())


def test_not_found_and_wrong_method_have_the_same_shape(serving: Callable):
    async def body():
        async with serving() as s:
            for response, status in ((await s.http.get("/nope"), 404), (await s.http.get(TEXT), 405)):
                assert response.status_code == status
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            wrong = await s.post(TEXT, model="other", prompt="a")
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "model")

    run(body())


def test_every_route_but_health_and_the_page_wants_the_key(serving: Callable):
    async def body():
        async with serving(api_keys=["k1"]) as s:
            paths = sorted({route.path.split("{")[0] for route in s.app.routes if hasattr(route, "path")})
            assert {"/health", "/metrics", "/openapi.json", TEXT, CHAT} <= set(paths)
            for path in [*paths, "/tokenize", "/nowhere"]:
                for key in (None, "Bearer k2", "Bearer ", "k1", "Bearer k1 "):
                    headers = {} if key is None else {"authorization": key}
                    for method in ("GET", "POST"):
                        response = await s.http.request(method, path, headers=headers)
                        if path in ("/health", "/", "/page.css", "/page.js"):
                            assert response.status_code in (200, 405)
                        else:
                            assert response.status_code == 401, path
            s.http.headers["authorization"] = "Bearer k1"
            assert (await s.http.get("/metrics")).status_code == 200
            assert (await s.post(TEXT, prompt="a", max_tokens=1)).status_code == 200

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_what_the_engine_sheds_is_429_with_when_to_come_back(serving: Callable, stream: bool, n: int):
    async def run():
        async with serving() as s:
            answer = await s.post(TEXT, prompt=[[7], [SHED]], n=n, max_tokens=200, stream=False)
            assert answer.status_code == 429
            answer = await s.post(TEXT, prompt=[SHED], n=n, max_tokens=9, stream=stream)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
            error = answer.json()["error"]
            assert (error["code"], error["message"]) == ("overloaded", "too many before it")
            text = (await s.http.get("/metrics")).text
            assert f'llmq_requests_total{{finish_reason="shed"}} {3 * n}.0' in text
            assert (await s.post(TEXT, prompt=[7], max_tokens=2)).status_code == 200
            assert s.service.num_sequences == 0

    asyncio.run(run())


def test_a_full_queue_is_429(serving: Callable):
    async def body():
        async with serving(max_queue=1, max_num_seqs=2) as s:
            assert (await s.post(TEXT, prompt="a", n=3, max_tokens=1)).status_code == 200
            for asked in ({"prompt": "a", "n": 4}, {"prompt": ["a", "b"], "n": 2}):  # it would never fit
                error = (await s.post(TEXT, max_tokens=1, **asked)).json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", "n")
                assert "--max-queue" in error["message"]

        async with serving(max_queue=3, max_num_seqs=2) as s:
            most = 0

            async def ask(number: int) -> tuple[int, str | None]:
                nonlocal most
                made = await s.post(TEXT, prompt="a", max_tokens=200, ignore_eos=True, stream=number % 2 == 0)
                most = max(most, s.service.num_sequences)
                return made.status_code, made.headers.get("retry-after")

            answers = await asyncio.gather(*(ask(number) for number in range(30)))
            assert most <= 5
            assert sorted(answers, key=str) == [(200, None)] * 5 + [(429, "1")] * 25
            assert s.service.num_calls == 0
            assert 'llmq_requests_total{finish_reason="queue_full"} 25.0' in (await s.http.get("/metrics")).text

    run(body())


def test_a_running_search_takes_the_room_of_its_beams(serving: Callable):
    async def body():
        async with serving(max_queue=4, max_num_seqs=2) as s:
            search = {"use_beam_search": True, "beam_width": 5, "max_tokens": 200}
            running = asyncio.ensure_future(s.post(TEXT, prompt="a", **search))
            while not s.service.num_calls:
                await asyncio.sleep(0)
            assert s.service.num_sequences == 5
            assert (await s.post(TEXT, prompt="a", n=2, max_tokens=1)).status_code == 429
            assert (await s.post(TEXT, prompt="a", max_tokens=1)).status_code == 200
            assert (await running).status_code == 200
            assert s.service.num_sequences == 0

    run(body())


def test_while_draining_nothing_new_is_taken_and_what_runs_finishes(serving: Callable):
    async def body():
        async with serving() as s:
            running = asyncio.ensure_future(s.post(TEXT, prompt="a", max_tokens=200))
            while not s.service.num_calls:
                await asyncio.sleep(0)
            s.service.draining = True
            for response in (await s.post(TEXT, prompt="a"), await s.http.get("/ready")):
                assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
            assert (await s.http.get("/health")).status_code == 200
            assert (await running).json()["usage"]["completion_tokens"] == 200
            assert s.service.num_calls == 0

    run(body())


def test_metrics_follow_the_engine(serving: Callable):
    async def body():
        async with serving() as s:
            await s.post(TEXT, prompt="a", n=2, max_tokens=3)
            text = (await s.http.get("/metrics")).text
        for line in (
            'llmq_requests_total{finish_reason="length"} 2.0',
            "llmq_requests_running 0.0",
            "llmq_kv_blocks_used 0.0",
            "llmq_kv_blocks_total 64.0",
            "llmq_preempted_tokens_total 0.0",
            "llmq_deferrals_total 0.0",
            "llmq_time_to_first_token_seconds_count 2.0",
            "llmq_inter_token_latency_seconds_count 4.0",
            "llmq_request_latency_seconds_count 2.0",
        ):
            assert line in text

    run(body())


async def _hang_up(app, path: str, body: dict, after: Callable[[], bool]) -> list[dict]:
    """Speak ASGI as a server does whose client goes once `after()`; returns what was sent to it."""
    content = json.dumps({"model": "tiny", **body}).encode()
    incoming = [{"type": "http.request", "body": content, "more_body": False}]
    sent = []

    async def receive():
        if incoming:
            return incoming.pop()
        while not after():
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_the_engine(serving: Callable, stream: bool):
    async def body():
        async with serving(max_model_len=10**6) as s:
            wanted = {"prompt": "a", "max_tokens": 500_000, "ignore_eos": True, "n": 2, "stream": stream}
            await _hang_up(s.app, TEXT, wanted, after=lambda: s.engine.has_unfinished_requests)
            assert len(s.engine.aborted) == 2
            assert not s.engine.has_unfinished_requests
            assert (s.service.client.num_unfinished, s.service.num_calls) == (0, 0)
            assert 'finish_reason="abort"} 2.0' in (await s.http.get("/metrics")).text

    run(body())
