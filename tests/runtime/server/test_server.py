"""The server as a process of its own, around a fake engine: what it imports, its signals, its exit codes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

RUN = """
import json, sys
import msgspec
from llmq.profiles.errors import InputError
from llmq.runtime.server import engine_client
from llmq.runtime.server.server import ServerConfig, serve

if len(sys.argv) > 3:  # seconds without a message after which an engine that works, or idles, is said to stand still
    engine_client.STALL_BUSY_S, engine_client.STALL_IDLE_S = json.loads(sys.argv[3])
config = msgspec.json.decode(sys.argv[1], type=ServerConfig)
try:
    code = serve(config, engine_command=json.loads(sys.argv[2]))
except InputError as error:
    print(f"refused: {error}", file=sys.stderr)
    code = 2
heavy = {"torch", "transformers"} & set(sys.modules)
print(f"imported: {sorted(heavy)}", file=sys.stderr, flush=True)
sys.exit(code)
"""


class Program:
    """`with` its stderr read up to the line that says where it listens."""

    def __init__(self, config: dict, command: list[str], stall: list[float] | None = None) -> None:
        arguments = [config, command] if stall is None else [config, command, stall]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(json.dumps, arguments)], stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self.url = ""
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found[0]
                break

    def engine_pid(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=5)

    def post(self, **body) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"model": "tiny", "prompt": "a", **body}, timeout=20)

    def end(self) -> tuple[int, str]:
        """(exit code, all of stderr), waiting for it to end."""
        rest = self.process.communicate(timeout=20)[1]
        return self.process.returncode, "".join(self.lines) + rest


@pytest.fixture
def program(model_folder: Path, fake_command: list[str]) -> Iterator[Callable[..., Program]]:
    programs = []

    def start(*, engine: dict | None = None, stall: list[float] | None = None, **config) -> Program:
        whole = {"engine": {"model": str(model_folder), "max_model_len": 10**6, **(engine or {})}, "port": 0, **config}
        programs.append(Program(whole, fake_command, stall))
        return programs[-1]

    yield start
    for one in programs:
        one.process.kill()
        one.process.communicate()


def _open_stream(program: Program, max_tokens: int) -> tuple[httpx.Client, Iterator[str], httpx.Response]:
    client = httpx.Client(timeout=20)
    body = {"model": "tiny", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    response = client.send(client.build_request("POST", f"{program.url}/v1/completions", json=body), stream=True)
    lines = response.iter_lines()
    next(lines)
    return client, lines, response


def test_it_serves_without_torch_and_ends_with_0(program: Callable[..., Program]):
    running = program()
    assert "model tiny" in running.lines[-1]
    assert "KV-cache 64 blocks × 16 = 1024 tokens" in running.lines[-1]
    assert running.post(max_tokens=2).json()["usage"]["completion_tokens"] == 2
    running.process.send_signal(signal.SIGTERM)
    code, stderr = running.end()
    assert code == 0, stderr
    assert "imported: []" in stderr
    assert "Traceback" not in stderr


def test_sigterm_lets_a_stream_finish_and_refuses_new_requests(program: Callable[..., Program]):
    running = program()
    client, lines, _ = _open_stream(running, 1000)
    running.process.send_signal(signal.SIGTERM)
    refused = _until(lambda: running.post(max_tokens=1), lambda response: response.status_code == 503)
    assert refused.json()["error"]["code"] == "shutting_down"
    *_, last = (line for line in lines if line)
    client.close()
    assert last == "data: [DONE]"
    code, stderr = running.end()
    assert code == 0, stderr


def test_the_drain_ends_at_its_timeout(program: Callable[..., Program]):
    running = program(drain_timeout_s=0.3)
    client, lines, _ = _open_stream(running, 900_000)
    running.process.send_signal(signal.SIGTERM)
    *_, last = (line for line in lines if line)
    client.close()
    assert "shutting_down" in last
    code, stderr = running.end()
    assert code == 0
    assert "cut off 1 request\n" in stderr, stderr


def test_a_second_signal_ends_at_once(program: Callable[..., Program]):
    running = program()
    client, *_held = _open_stream(running, 900_000)  # closed when nobody holds it
    running.process.send_signal(signal.SIGTERM)
    _until(lambda: running.post(max_tokens=1), lambda response: response.status_code == 503)
    started = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    code, _ = running.end()
    client.close()
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - started < 5


def test_a_dead_engine_is_an_error_in_the_stream_and_exit_code_1(program: Callable[..., Program]):
    running = program()
    client, lines, _ = _open_stream(running, 900_000)
    assert running.post(prompt=[501], max_tokens=1).status_code == 503
    *_, last = (line for line in lines if line)
    client.close()
    assert "engine_dead" in last
    code, stderr = running.end()
    assert code == 1
    assert "the forward failed" in stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads the engine's pid from /proc")
def test_an_engine_that_stands_still_is_unhealthy_until_it_goes_on(program: Callable[..., Program]):
    running = program(stall=[0.7, 2.5])
    client, lines, _ = _open_stream(running, 3000)
    engine = running.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    started = time.monotonic()
    said = _until(running.health, lambda response: response.status_code == 503).json()["error"]
    assert time.monotonic() - started < 5
    assert said["code"] == "engine_unavailable"
    assert "no step for" in said["message"]
    assert running.post(max_tokens=1).status_code == 503  # at once, not when the engine wakes
    os.kill(engine, signal.SIGCONT)
    _until(running.health, lambda response: response.status_code == 200)
    *_, last = (line for line in lines if line)
    client.close()
    assert last == "data: [DONE]"
    os.kill(engine, signal.SIGSTOP)  # idle this time
    assert _until(running.health, lambda response: response.status_code == 503).status_code == 503
    os.kill(engine, signal.SIGCONT)
    _until(running.health, lambda response: response.status_code == 200)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the engine's pid from /proc")
def test_a_server_ends_though_its_engine_stands_still(program: Callable[..., Program]):
    running = program(drain_timeout_s=0.3)
    client, lines, _ = _open_stream(running, 900_000)
    engine = running.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    running.process.send_signal(signal.SIGTERM)
    *_, last = (line for line in lines if line)
    client.close()
    assert "shutting_down" in last
    assert running.end()[0] == 0
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the engine's pid from /proc")
@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_that_stands_still_for_good_ends_the_server(program: Callable[..., Program], busy: bool):
    running = program(stall=[0.5, 2.0], stall_timeout_s=1.0)
    client, lines, _ = _open_stream(running, 900_000 if busy else 1)
    engine = running.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    started = time.monotonic()
    *_, last = (line for line in lines if line)
    client.close()
    assert ("engine_dead" in last) is busy
    code, stderr = running.end()
    assert time.monotonic() - started < 15
    assert code == 1
    assert "the engine is dead: it stands still: no step for" in stderr
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads_ends_at_once(model_folder: Path, number: int):
    ignores = (
        "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('up', file=sys.stderr); time.sleep(60)"
    )
    never_ready = [sys.executable, "-c", ignores]
    config = {"engine": {"model": str(model_folder)}, "port": 0}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(config), json.dumps(never_ready)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline() == "up\n"
    started = time.monotonic()
    process.send_signal(number)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 128 + number
    assert time.monotonic() - started < 4
    assert "ended while the model was loading" in said
    assert "Traceback" not in said


def test_what_cannot_start_is_refused_with_2(program: Callable[..., Program]):
    code, stderr = program(engine={"max_num_seqs": 13}).end()
    assert (code, "refused: --max-num-seqs 13: unlucky" in stderr) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, stderr = program(port=taken.getsockname()[1]).end()
    assert code == 2
    assert "cannot listen on 127.0.0.1" in stderr
    assert "Traceback" not in stderr


def _until(attempt: Callable[[], httpx.Response], satisfied: Callable[[httpx.Response], bool]) -> httpx.Response:
    deadline = time.monotonic() + 10
    while not satisfied(response := attempt()):
        assert time.monotonic() < deadline, response.text
        time.sleep(0.02)
    return response
