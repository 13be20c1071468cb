"""`llmq serve` from its first line to its exit code."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from served import LLMQ, Served

pytestmark = pytest.mark.system

TEXT = "/v1/completions"


def refused(*arguments: str | Path) -> str:
    """What `llmq serve` says when it refuses, which is soon and with exit code 2."""
    started = time.monotonic()
    ended = subprocess.run([LLMQ, "serve", *arguments], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert "Traceback" not in ended.stderr
    assert time.monotonic() - started < 20
    return ended.stderr


def test_what_the_kv_cache_cannot_hold_is_refused_before_the_weights_load(smollm2: Path):
    said = refused(smollm2, "--dtype", "bfloat16", "--kv-cache-memory", "64MiB", "--max-model-len", "8192")
    for words in ("180.0 MiB", "64.0 MiB", "2912", "--kv-cache-memory", "--max-model-len"):
        assert words in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pp", "31"], "--pp 31: a stage holds one layer or more, and this model has 30; valid: 1 to 30"),
        (["--pp", "2", "--slo", "tpot=1s"], "--slo is kept one step at a time, and --pp 2 computes 2 at once"),
        (["--tp", "2"], "does not split 9 heads, 3 KV heads and an MLP of 1536 features evenly; valid: 1, 3"),
        (["--dtype", "int3"], "--dtype int3"),
        (["--kv-cache-memory", "64M"], "64M"),
        (["--max-model-len", "9000", "--kv-cache-memory", "1GiB"], "8192"),
        (["--api-key", ""], "--api-key is empty"),
        (["--salt-per-key"], "--salt-per-key"),
        (["--generation-config", "mine"], "--generation-config mine"),
        (["--gpu-memory-utilization", "90"], "--gpu-memory-utilization 90"),
        (["--gpu-memory-utilization", "0.5", "--kv-cache-memory", "1GiB"], "exclude each other"),
        (["--gpu-memory-utilization", "0.5", "--device", "cpu"], "the engine runs on a CPU here"),
    ],
)
def test_wrong_flags_are_refused(smollm2: Path, flags: list[str], words: str):
    assert words in refused(smollm2, *flags)


def test_the_longest_request_that_fits_and_a_killed_engine(smollm2: Path):
    server = Served(smollm2, "--dtype", "fp32", "--kv-cache-memory", "16MiB")
    assert "22 blocks × 16 = 352 tokens" in server.stderr
    assert "at most 352 tokens a request" in server.stderr
    answer = server.complete(prompt=[504] * 300, max_tokens=52, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 352
    assert server.post(TEXT, prompt=[504] * 300, max_tokens=53).status_code == 400

    status: list[int] = []
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
    waiting = threading.Thread(target=lambda: status.append(server.post(TEXT, **body).status_code))
    waiting.start()
    while server.metric("llmq_requests_running") == 0:
        time.sleep(0.02)
    os.kill(server.engine_pid(), signal.SIGKILL)
    waiting.join(30)
    assert status == [503]
    assert server.wait(30) == 1
    assert "ended by signal 9" in server.stderr


def test_sigterm_finishes_what_runs_and_leaves_no_orphan(smollm2: Path):
    server = Served(smollm2, "--dtype", "fp32", "--max-model-len", "256", "--api-key", "k1", "--drain-timeout", "120")
    assert server.http.get("/metrics").status_code == 401
    assert server.http.get("/health").status_code == 200
    server.http.headers["authorization"] = "Bearer k1"
    engine = server.engine_pid()
    mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, engine)]
    assert ["libtorch" in libraries for libraries in mapped] == [False, True]
    lines: list[str] = []
    running = threading.Thread(
        target=lambda: lines.extend(
            server.post(TEXT, prompt="Once", max_tokens=40, ignore_eos=True, stream=True).text.split("\n\n")
        )
    )
    running.start()
    while server.metric("llmq_requests_running") == 0:
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    while (response := httpx.get(f"{server.url}/ready", headers=server.http.headers)).status_code != 503:
        time.sleep(0.02)
    assert response.json()["error"]["code"] == "shutting_down"
    running.join(120)
    assert lines[-2] == "data: [DONE]"
    assert server.wait() == 0, server.stderr
    assert not Path(f"/proc/{engine}").exists()
    assert "k1" not in server.stderr
