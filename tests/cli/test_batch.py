"""`llmq batch` as a program: killed in the middle, run again, refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmq.cli.batch import app

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def model(tiny_llama) -> Path:
    return tiny_llama(max_position_embeddings=512)


@pytest.fixture
def requests(tmp_path, model) -> Path:
    path = tmp_path / "in.jsonl"
    write(path, model, NUM_REQUESTS)
    return path


def write(path: Path, model: Path, count: int, **changes) -> None:
    lines = []
    for number in range(count):
        body = {"model": model.name, "prompt": [number + 3] * 8, "max_tokens": 100, "ignore_eos": True, **changes}
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def command(requests: Path, output: Path, model: Path, *options: str) -> list[str]:
    few = ["--max-num-seqs", "2", "--threads", "1"]
    return [
        sys.executable,
        "-m",
        "llmq",
        "batch",
        str(requests),
        "-o",
        str(output),
        "--model",
        str(model),
        *few,
        *options,
    ]


def run(*args, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=120, **settings)


def texts(output: Path) -> dict[str, str]:
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({result["custom_id"] for result in results}) == len(results)
    return {result["custom_id"]: result["response"]["body"]["choices"][0]["text"] for result in results}


def test_killed_in_the_middle_it_computes_what_is_missing(tmp_path, requests, model):
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    process = subprocess.Popen(command(requests, output, model), stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 100
    while not output.exists() or output.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    there = output.read_bytes().count(b"\n")
    assert there < NUM_REQUESTS
    before = output.read_bytes()[: output.read_bytes().rindex(b"\n") + 1]

    done = run(requests, output, model, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["found"], summary["computed"]) == (there, NUM_REQUESTS - there)
    assert summary["answered"] == NUM_REQUESTS
    assert output.read_bytes().startswith(before)
    assert run(requests, whole, model).returncode == 0
    assert texts(output) == texts(whole)  # sampled: a seed comes of the request's name


def test_a_finished_batch_loads_nothing(tmp_path, requests, model):
    output = tmp_path / "out.jsonl"
    write(requests, model, 2, max_tokens=2)
    assert run(requests, output, model).returncode == 0
    again = run(requests, output, model)
    assert again.returncode == 0
    assert "2 there already" in again.stdout
    assert again.stderr == ""

    write(requests, model, 3, max_tokens=2)
    changed = run(requests, output, model)
    assert changed.returncode == 2
    assert "begun with another input" in changed.stderr
    assert "Traceback" not in changed.stderr
    assert len(texts(output)) == 2


def test_refused_requests_make_exit_code_1(tmp_path, requests, model):
    write(requests, model, 2, max_tokens=2)
    with open(requests, "a") as file:
        bad = {"model": model.name, "prompt": "x", "temperature": 9}
        file.write(json.dumps({"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": bad}))
    done = run(requests, tmp_path / "out.jsonl", model, "--json")
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert (summary["answered"], summary["failed"]) == (2, 1)
    # The failure is a result: a second run has nothing left to do and says the same.
    assert run(requests, tmp_path / "out.jsonl", model).returncode == 1


def invoke(*args: str) -> Exception:
    return CliRunner().invoke(app, [str(arg) for arg in args]).exception


def test_the_model_must_be_clear(tmp_path, requests, model):
    write(requests, model, 1)
    error = invoke(requests, "-o", tmp_path / "out", "--model", model, "--served-model-name", "other")
    assert error.exit_code == 2
    assert f"With --served-model-name {model.name}" in str(error)
    lines = requests.read_text() + requests.read_text().replace('"r0"', '"r1"').replace(model.name, "gpt")
    requests.write_text(lines)
    error = invoke(requests, "-o", tmp_path / "out")
    assert error.exit_code == 2
    assert "--model" in str(error)
    assert not (tmp_path / "out").exists()


def test_bad_options_are_refused_before_anything_is_written(tmp_path, requests, model):
    for options in (["--dtype", "bf61"], ["--device", "tpu"], ["--max-model-len", "many"]):
        error = invoke(requests, "-o", tmp_path / "out", "--model", model, *options)
        assert getattr(error, "exit_code", None) == 2, options
    assert not (tmp_path / "out").exists()


def test_ranks_that_a_model_cannot_be_split_into_are_refused(requests, tmp_path, model):
    done = run(requests, tmp_path / "out.jsonl", model, "--pp", "3")
    assert done.returncode == 2
    assert "--pp 3: a stage holds one layer or more, and this model has 2; valid: 1 to 2" in done.stderr
    done = run(requests, tmp_path / "out.jsonl", model, "--tp", "3")
    assert done.returncode == 2
    assert "--tp 3 does not split 4 heads, 2 KV heads and an MLP of 128 features evenly; valid: 1, 2, 4" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
