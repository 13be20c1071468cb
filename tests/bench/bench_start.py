"""From the start of a process to its first token, and the most memory that it took on the way.

Twice: an engine in a process of its own (Python, torch, our modules, the model, the first token of a prompt of 128),
and `llmq serve` (until it is ready, and until the first token of an answer is at its client), with the memory of both
its processes. Medians of the turns. The disk's cache is warm, and so is that of packed weights but for the very
first start, which is shown apart.

    python tests/bench/bench_start.py smol-4bit --threads 2
"""

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import bench_report
from bench_report import Report

from llmq.profiles.checkpoint import find_model

READY = re.compile(r"llmq serve: http://([\d.]+):(\d+)/v1")
PROMPT = [(7 * position) % 400 + 3 for position in range(128)]
# Seconds since the process's start at the end of each phase, and its highest resident memory.
ENGINE = """
import json, os, sys, time
def age():
    ticks = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
ends = {"Python": age()}
import torch
ends["import torch"] = age()
from llmq.runtime.engine import Engine
from llmq.runtime.config import EngineConfig
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams
ends["import llmq"] = age()
model, threads, prompt = json.loads(sys.argv[1])
engine = Engine.from_config(EngineConfig(model=model, threads=threads))
ends["load the model"] = age()
params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
engine.add_request(EngineRequest(request_id="0", prompt_token_ids=prompt, sampling_params=params))
while engine.has_unfinished_requests:
    engine.step()
ends["first token"] = age()
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"ends": ends, "peak_bytes": 1024 * peak}), flush=True)
os._exit(0)
"""


def start_engine(model: Path, threads: int) -> dict:
    told = json.dumps([str(model), threads, PROMPT])
    done = subprocess.run([sys.executable, "-c", ENGINE, told], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def start_server(model: Path, threads: int) -> dict:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "llmq", "serve", str(model), "--port", "0", "--threads", str(threads)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if found := READY.search(line):
                break
        else:
            sys.exit(f"llmq serve ended with {server.wait()}")
        ends = {"ready": time.perf_counter() - begin}
        connection = http.client.HTTPConnection(found[1], int(found[2]))
        body = {"model": model.name, "prompt": PROMPT, "max_tokens": 2, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        first = connection.getresponse().readline()
        if not first.startswith(b"data: {"):
            sys.exit(f"no event but {first!r}")
        ends["first token"] = time.perf_counter() - begin
        return {"ends": ends, "peak_bytes": sum(map(peak_bytes, family_of(server.pid)))}
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()


def family_of(pid: int) -> list[int]:
    """A process and its descendants."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(one for child in children for one in family_of(child))]


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(arguments: argparse.Namespace) -> Report:
    model = find_model(arguments.model, keep_blocks=True)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    first = start_engine(model, arguments.threads)
    turns: dict[str, list[dict]] = {"an engine": [], "llmq serve": []}
    for _ in range(arguments.turns):
        turns["an engine"].append(start_engine(model, arguments.threads))
        turns["llmq serve"].append(start_server(model, arguments.threads))
    rows = []
    for what, made in turns.items():
        for phase in made[0]["ends"]:
            ends = [one["ends"][phase] for one in made]
            rows.append([what, phase, *(f"{number:.2f}" for number in (median(ends), min(ends), max(ends)))])
        rows.append(
            [what, "peak MiB", *(f"{f([one['peak_bytes'] for one in made]) / 2**20:.0f}" for f in (median, min, max))]
        )
    return Report(
        f"Seconds since the start at the end of each phase, {arguments.turns} turns, {arguments.threads} thread(s)",
        ["process", "phase", ">median", ">least", ">most"],
        rows,
        {"first": first, "turns": turns},
        [f"an engine's very first start here: {first['ends']['first token']:.2f} s"],
    )


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("model", nargs="?", default="smollm2-135m")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--turns", type=int, default=5)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
