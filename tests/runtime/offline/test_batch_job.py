"""A batch against an engine without a model: what runs at once, what a failure is, what totals say."""

import json

import pytest
from fake_engine import FATAL, REFUSED, FakeEngine

from llmq.profiles.errors import FailedError
from llmq.runtime.config import EngineConfig
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.offline.batch_file import BatchFile
from llmq.runtime.offline.batch_job import BatchJob
from llmq.runtime.offline.batch_output import BatchOutput


class WatchedEngine(FakeEngine):
    most_at_once = 0

    def step(self):
        self.most_at_once = max(self.most_at_once, len(self._running))
        return super().step()


@pytest.fixture
def engine(tiny_llama):
    return WatchedEngine(EngineConfig(model=str(tiny_llama())))


@pytest.fixture
def run(engine, tmp_path):
    """run(bodies by custom_id, ...) -> (totals, results by custom_id). Again: goes on."""

    def run_batch(bodies: dict, *, seed: int = 0, progress=lambda *_, **__: None):
        path = tmp_path / "in.jsonl"
        path.write_text(
            "\n".join(
                json.dumps(
                    {
                        "custom_id": name,
                        "method": "POST",
                        "url": "/v1/chat/completions" if "messages" in body else "/v1/completions",
                        "body": {"model": "tiny", **body},
                    }
                )
                for name, body in bodies.items()
            )
        )
        tokenizer = Tokenizer.from_folder(engine.info.model)
        job = BatchJob(engine, tokenizer, model_name="tiny", max_num_seqs=4, seed=seed, progress=progress)
        with BatchOutput(tmp_path / "out.jsonl", {}) as output:
            totals = job.run(BatchFile.index(path), output)
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return totals, {line["custom_id"]: line for line in lines}

    return run_batch


def test_answers_are_openais(run):
    totals, results = run(
        {
            "text": {"prompt": "hello there", "max_tokens": 3},
            "chat": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True},
            "two": {"prompt": [5, 6], "n": 2, "max_tokens": 4},
        }
    )
    text, chat, two = (results[name]["response"]["body"] for name in ("text", "chat", "two"))
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in results.values())
    assert (text["object"], text["usage"]["completion_tokens"]) == ("text_completion", 3)
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert len(chat["choices"][0]["logprobs"]["content"]) == 2
    assert results["chat"]["response"]["request_id"] == chat["id"]
    assert len(two["choices"]) == 2
    assert (totals.num_answered, totals.num_failed, totals.completion_tokens) == (3, 0, 13)


def test_a_refused_request_is_a_result_of_its_own(run):
    totals, results = run(
        {
            "hot": {"prompt": "x", "temperature": 9},
            "else": {"prompt": "x", "model": "gpt"},
            "engine": {"prompt": [REFUSED]},
            "good": {"prompt": "x"},
        }
    )
    responses = {name: result["response"] for name, result in results.items()}
    assert [responses[name]["status_code"] for name in ("hot", "else", "engine", "good")] == [400, 404, 500, 200]
    assert responses["hot"]["body"]["error"]["param"] == "temperature"
    assert responses["else"]["body"]["error"]["code"] == "model_not_found"
    assert "refused on arrival" in responses["engine"]["body"]["error"]["message"]
    assert (totals.num_answered, totals.num_failed) == (1, 3)


def test_the_batch_is_full_and_the_queue_short(run, engine):
    shown = []
    run(
        {str(number): {"prompt": [number + 3], "max_tokens": 5} for number in range(40)},
        progress=lambda stage, done, total, **_: shown.append((done, total)),
    )
    assert engine.most_at_once == 8  # max_num_seqs running in a real engine, as many waiting
    assert shown[0] == (0, 40)
    assert shown[-1] == (40, 40)


def test_only_what_is_missing_is_computed(run, engine):
    bodies = {str(number): {"prompt": [number + 3], "max_tokens": 2} for number in range(10)}
    run({name: bodies[name] for name in "0123"})
    engine.added.clear()
    totals, results = run(bodies)
    assert sorted(request.prompt_token_ids[0] - 3 for request in engine.added) == [4, 5, 6, 7, 8, 9]
    assert totals.num_answered == 6
    assert len(results) == 10


def test_a_dead_engine_ends_the_job_and_is_nobodys_result(run, engine):
    bodies = {"good": {"prompt": [5], "max_tokens": 1}, "bad": {"prompt": [FATAL]}}
    with pytest.raises(FailedError, match="the forward failed"):
        run(bodies)
    engine._running.clear()  # as a new one
    bodies["bad"] = {"prompt": [6]}
    _, results = run(bodies)
    assert {result["response"]["status_code"] for result in results.values()} == {200}


def test_seeds_come_of_the_name(run, engine):
    run({"a": {"prompt": [5]}, "b": {"prompt": [5]}, "own": {"prompt": [5], "seed": 7}}, seed=1)
    first = [request.sampling_params.seed for request in engine.added]
    assert len(set(first)) == 3
    assert first[2] == 7
    engine.added.clear()
    run({"c": {"prompt": [5]}}, seed=1)
    assert engine.added[0].sampling_params.seed not in first


def test_a_stop_string_frees_the_engine(run, engine):
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
    _, results = run({"whole": asked})
    text = results["whole"]["response"]["body"]["choices"][0]["message"]["content"]
    totals, results = run({"whole": asked, "cut": asked | {"stop": text[20:23]}})
    choice = results["cut"]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text[: text.index(text[20:23])]
    assert totals.completion_tokens < 50
    assert len(engine.aborted) == 1
