import pytest

from llmq.evals.stepping import RequestStream
from llmq.profiles.errors import FailedError
from llmq.runtime.request import EngineRequest, RequestOutput
from llmq.runtime.sampling_params import SamplingParams


def requests(count: int, max_tokens: int = 3):
    for i in range(count):
        yield EngineRequest(
            request_id=str(i), prompt_token_ids=[i, i + 1], sampling_params=SamplingParams(max_tokens=max_tokens)
        )


def test_every_request_finishes_and_no_more_than_the_bound_are_in_flight(toy_engine):
    engine = toy_engine()
    outputs = list(RequestStream(engine, requests(20), max_in_flight=4))
    assert sorted(int(o.request_id) for o in outputs if o.finish_reason == "length") == list(range(20))
    assert engine.max_seen_in_flight == 4


def test_an_interruption_leaves_nothing_in_the_engine(toy_engine):
    engine = toy_engine()

    def interrupted():
        for _ in RequestStream(engine, requests(20, max_tokens=50)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not engine.requests


def test_an_aborted_request_shows_no_further_output(toy_engine):
    engine = toy_engine()
    stream = RequestStream(engine, requests(2, max_tokens=5))
    seen = []
    for output in stream:
        seen.append(output.request_id)
        if output.request_id == "0":
            stream.abort("0")
    assert seen.count("0") == 1
    assert seen.count("1") == 5


def test_a_failed_request_is_an_error_with_its_reason(toy_engine, monkeypatch):
    engine = toy_engine()
    failure = RequestOutput(request_id="0", finish_reason="error", error="no kernel")
    monkeypatch.setattr(engine, "step", lambda: [failure])
    with pytest.raises(FailedError, match="no kernel"):
        list(RequestStream(engine, requests(2)))
    assert not engine.requests
