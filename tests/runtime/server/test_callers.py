"""Keys, tenants, salts, priority and the time that a request has."""

import asyncio
import json
from collections.abc import Callable

import pytest

from llmq.runtime.server.callers import ApiKeys, Caller

TEXT = "/v1/completions"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


@pytest.mark.parametrize(
    ("keys", "salt_per_key", "salted"),
    [(["a"], None, False), (["a"], True, True), (["a", "b"], None, True), (["a", "b"], False, False)],
)
def test_each_key_is_a_tenant_and_several_keys_share_no_prefix(keys, salt_per_key, salted):
    api_keys = ApiKeys(keys, salt_per_key=salt_per_key)
    callers = [api_keys.identify(f"Bearer {key}".encode()) for key in keys]
    assert len({caller.tenant for caller in callers} - {""}) == len(keys)
    assert [bool(caller.cache_salt) for caller in callers] == [salted] * len(keys)
    assert len({caller.cache_salt for caller in callers}) == (len(keys) if salted else 1)
    assert not any(key in caller.tenant.split() for key, caller in zip(keys, callers, strict=True))
    for wrong in (b"", b"Bearer ", b"Bearer c", b"a", b"Bearer a "):
        assert api_keys.identify(wrong) is None
    assert ApiKeys().identify(b"anything") == Caller()


def test_the_engine_hears_who_calls_and_how_urgent_it_is(serving: Callable):
    async def body():
        async with serving(api_keys=["k1", "k2"]) as s:
            for key, priority in (("k1", -5), ("k2", None), ("k1", 7)):
                s.http.headers["authorization"] = f"Bearer {key}"
                assert (await s.post(TEXT, prompt="a", max_tokens=1, priority=priority)).status_code == 200
            for wrong in (2**31, -(2**31) - 1, 0.5):
                refused = await s.post(TEXT, prompt="a", priority=wrong)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
            first, second, third = s.engine.added
            assert first.tenant == third.tenant != second.tenant
            assert first.cache_salt == third.cache_salt != second.cache_salt
            assert [one.priority for one in s.engine.added] == [-5, 0, 7]

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_out_of_time_is_told_so_and_frees_the_engine(serving: Callable, stream: bool):
    async def body():
        async with serving(max_model_len=10**6, request_timeout_s=0.1) as s:
            wanted = {"prompt": "a", "max_tokens": 900_000, "ignore_eos": True, "n": 3, "stream": stream}
            response = await s.post(TEXT, **wanted)
            assert (await s.post(TEXT, prompt="a", max_tokens=2)).status_code == 200
            assert len(s.engine.aborted) == 3
            assert not s.engine.has_unfinished_requests
            assert s.service.client.num_unfinished == 0
            assert 'finish_reason="timeout"} 3.0' in (await s.http.get("/metrics")).text
        if stream:
            assert response.status_code == 200
            last = response.text.removesuffix("\n\n").rsplit("\n\n", 1)[1]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert response.status_code == 504
            error = response.json()["error"]
        assert error["code"] == "request_timeout"
        assert "0.1 s" in error["message"]

    run(body())
