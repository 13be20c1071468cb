"""What an evaluation asks of a server, against scripted ones; llmq's own is in the system tests."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from llmq.evals.remote_engine import RemoteEngine, check_abilities
from llmq.evals.stepping import RequestStream
from llmq.profiles.errors import FailedError, InputError
from llmq.runtime.request import EngineInfo, EngineRequest
from llmq.runtime.sampling_params import SamplingParams


@pytest.fixture
def server():
    """server(answer) -> (url, bodies): `answer(body)` gives (status, JSON) for each POST."""
    running = []

    def start(answer):
        bodies = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                bodies.append(body)
                status, content = answer(body)
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        running.append(http)
        return f"http://127.0.0.1:{http.server_address[1]}", bodies

    yield start
    for http in running:
        http.shutdown()
        http.server_close()


def choice(body, **changes):
    """As a server that has everything answers."""
    scored = [None] + [-1.0] * (len(body["prompt"]) - 1)
    logprobs = {"token_logprobs": scored, "top_logprobs": [s and {"a": s} for s in scored]}
    return {"choices": [{"text": "", "logprobs": logprobs, "token_ids": [1], "finish_reason": "length", **changes}]}


def test_a_server_with_everything_is_taken_and_one_that_lacks_something_told_what(server):
    check_abilities(server(lambda body: (200, choice(body)))[0], "m")
    no_echo, _ = server(lambda body: (200, choice(body, logprobs={"token_logprobs": [-1.0], "top_logprobs": [{}]})))
    with pytest.raises(InputError, match="does not give log probabilities of a prompt of token ids") as error:
        check_abilities(no_echo, "m")
    assert "return_token_ids" not in str(error.value)
    neither, _ = server(lambda body: (400, {"error": {"message": "no"}}))
    with pytest.raises(InputError, match=r"echo with logprobs and max_tokens 0\), nor the token ids"):
        check_abilities(neither, "m")


def engine(url: str, **options) -> RemoteEngine:
    info = EngineInfo(
        model="m",
        vocab_size=10,
        max_model_len=64,
        eos_token_ids=[],
        num_blocks=0,
        block_tokens=0,
        kv_cache_bytes=0,
        weight_bytes=0,
        device="remote",
        fingerprint={},
    )
    return RemoteEngine(url, "m", info, **options)


SCORING = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=2)


@pytest.mark.parametrize("scores_from", [False, True])
def test_scores_are_of_the_asked_positions_and_greedy_where_nothing_is_likelier(server, scores_from):
    lists = {
        "token_logprobs": [None, -9.0, -0.5, -2.0],
        "top_logprobs": [None, {"x": -1.0, "y": -9.0}, {"x": -0.5}, {"x": -1.0, "y": -2.0}],
    }
    url, bodies = server(lambda body: (200, choice(body, logprobs=lists)))
    with engine(url, scores_from=scores_from) as remote:
        request = EngineRequest(request_id="0", prompt_token_ids=[4, 5, 6, 7], sampling_params=SCORING)
        (output,) = RequestStream(remote, [request])
    assert [(one.token_id, one.logprob, one.rank) for one in output.prompt_logprobs] == [(6, -0.5, 1), (7, -2.0, 2)]
    assert bodies[0]["prompt"] == [4, 5, 6, 7]
    assert ("prompt_logprobs_start" in bodies[0]) is scores_from
    assert bodies[0]["repetition_penalty"] == 1.0  # not what the server's generation_config.json says


def test_a_full_queue_is_waited_for_and_a_refusal_told(server, monkeypatch):
    monkeypatch.setattr("llmq.evals.remote_engine.time.sleep", lambda seconds: None)
    answers = iter([429, 429, 200, 400])
    url, bodies = server(
        lambda body: (200, choice(body)) if (status := next(answers)) == 200 else (status, {"error": {"message": "no"}})
    )
    with engine(url) as remote:
        request = EngineRequest(request_id="0", prompt_token_ids=[4, 5, 6], sampling_params=SCORING)
        assert [len(output.prompt_logprobs) for output in RequestStream(remote, [request])] == [1]
        assert len(bodies) == 3
        with pytest.raises(FailedError, match="the server answered 400: no"):
            list(RequestStream(remote, [request]))
