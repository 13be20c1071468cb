"""What serving costs beside computing: CPU time of the HTTP server, the scheduler and their messages, a token.

A server as `llmq serve` starts it, with an engine that has clocks in it (`timed_engine.py`), streams completions to
clients that only count bytes. Measured while all of them decode: the CPU time of the server's process (HTTP, text) and
that of the engine's process outside of its executor (scheduler, messages), each beside the time of a step. The
clients' own CPU time is in neither. A step's time is its CPU time over its threads, which other programs on the machine
disturb less than the wall clock (shown too).

    python tests/bench/bench_http_overhead.py smol-4bit --streams 64 --threads 2
    python tests/bench/bench_http_overhead.py smol-4bit --profile server.prof       # then: python -m pstats server.prof
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import bench_report
import msgspec
from bench_report import Report, percent
from timed_engine import TOTALS

from llmq.profiles.checkpoint import find_model
from llmq.runtime.config import EngineConfig
from llmq.runtime.server.server import ServerConfig

ENGINE = Path(__file__).with_name("timed_engine.py")
SERVE = """
import cProfile, msgspec, sys, time
from llmq.runtime.server.server import ServerConfig, serve
config = msgspec.json.decode(sys.argv[1], type=ServerConfig)
profiler = cProfile.Profile(time.thread_time) if sys.argv[3] else None
run = profiler.runcall if profiler else lambda function, *a, **k: function(*a, **k)
code = run(serve, config, engine_command=(sys.executable, sys.argv[2]))
if profiler:
    profiler.dump_stats(sys.argv[3])
sys.exit(code)
"""
READY = re.compile(r"llmq serve: http://([\d.]+):(\d+)/v1")


@dataclass(frozen=True)
class Moment:
    """Totals since start, in seconds but for `steps` and `tokens`."""

    steps: float
    tokens: float
    step_wall_s: float
    step_cpu_s: float
    engine_cpu_s: float
    server_cpu_s: float

    def __sub__(self, other: "Moment") -> "Moment":
        return Moment(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))


class Server:
    """The server's process, and the totals of its engine."""

    def __init__(self, config: ServerConfig, folder: Path, profile: str) -> None:
        self._totals = folder / "totals"
        self._totals.write_bytes(bytes(TOTALS.size))
        environment = os.environ | {"LLMQ_BENCH_TOTALS": str(self._totals)}
        command = [sys.executable, "-c", SERVE, msgspec.json.encode(config).decode(), str(ENGINE), profile]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        said = ""
        for line in self._process.stderr:
            said += line
            if found := READY.search(line):
                self.address = (found[1], int(found[2]))
                return
        sys.exit(f"the server did not start: {said}")

    def moment(self) -> Moment:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])
        return Moment(*TOTALS.unpack(self._totals.read_bytes()), ticks / os.sysconf("SC_CLK_TCK"))

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate()


class Stream(asyncio.Protocol):
    """One streamed completion, of which only the events are counted."""

    def __init__(self, body: bytes) -> None:
        self.num_events = 0
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self._request = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self._request += b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        self.last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        self.last = (self.last + data)[-500:]
        if self.num_events:
            self.begun.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.begun.set()
        self.ended.set()


async def one_turn(server: Server, model: str, turn: int, arguments: argparse.Namespace) -> Moment:
    """What happened from when the last stream had its first token until the first had its last."""
    loop = asyncio.get_running_loop()
    streams = []
    for number in range(arguments.streams):
        prompt = [(7 * position + 13 * number + turn) % 1000 + 3 for position in range(arguments.prompt)]
        body = {"model": model, "prompt": prompt, "max_tokens": arguments.tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        stream = Stream(json.dumps(body).encode())
        await loop.create_connection(lambda one=stream: one, *server.address)
        streams.append(stream)
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    before = server.moment()
    await asyncio.wait(
        [asyncio.ensure_future(stream.ended.wait()) for stream in streams], return_when=asyncio.FIRST_COMPLETED
    )
    after = server.moment()
    await asyncio.gather(*(stream.ended.wait() for stream in streams))
    if refused := [stream.last for stream in streams if b"[DONE]" not in stream.last]:
        sys.exit(f"a stream broke off: {refused[0].decode(errors='replace')[-500:]}")
    return after - before


def figures_of(spans: list[Moment], threads: int) -> dict[str, Any]:
    """Medians of the turns, in microseconds a token; `overhead` is the share of a step's time."""

    def a_token(seconds: Any) -> float:
        return median(seconds(span) / span.tokens * 1e6 for span in spans)

    step = a_token(lambda span: span.step_cpu_s / threads)
    server = a_token(lambda span: span.server_cpu_s)
    engine = a_token(lambda span: span.engine_cpu_s - span.step_cpu_s)
    return {
        "step_us": step,
        "step_wall_us": a_token(lambda span: span.step_wall_s),
        "server_us": server,
        "scheduler_us": engine,
        "overhead": (server + engine) / step,
        "overheads": [(s.server_cpu_s + s.engine_cpu_s - s.step_cpu_s) / (s.step_cpu_s / threads) for s in spans],
        "tokens_a_step": median(span.tokens / span.steps for span in spans),
        "steps": [span.steps for span in spans],
    }


def measure(arguments: argparse.Namespace) -> Report:
    engine = EngineConfig(
        model=str(find_model(arguments.model)),
        threads=arguments.threads,
        max_num_seqs=arguments.streams,
        enable_prefix_caching=False,
        max_model_len=arguments.prompt + arguments.tokens,
    )
    config = ServerConfig(engine=engine, port=0, served_model_name="bench")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(config, Path(folder), arguments.profile)
        try:
            spans = [asyncio.run(one_turn(server, "bench", turn, arguments)) for turn in range(arguments.turns)]
        finally:
            server.end()
    found = figures_of(spans, arguments.threads)
    row = [f"{found[name]:.1f}" for name in ("server_us", "scheduler_us", "step_us", "step_wall_us")]
    spread = f"{percent(min(found['overheads']))} to {percent(max(found['overheads']))}"
    return Report(
        f"{arguments.streams} streams, {arguments.threads} thread(s), {arguments.turns} turns: microseconds a token",
        [">server CPU", ">scheduler CPU", ">step CPU / threads", ">step wall", ">overhead", ">of turns"],
        [[*row, percent(found["overhead"]), spread]],
        found,
    )


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("model", nargs="?", default="smollm2-135m")
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--prompt", type=int, default=128, help="Tokens of each prompt.")
    options.add_argument("--tokens", type=int, default=192, help="Tokens that each stream generates.")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--profile", default="", help="Profile the server into this file (which slows it).")
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
