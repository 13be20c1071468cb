"""What a step costs before any model: schedule() + update_from_output() at 256 running requests.

Once with nobody waiting, once with 1,000 requests waiting for room: admission is then asked again at every step. CPU
time of the thread, prefix caching on: every 16th step all requests take a block and offer one to the cache.
"""

import argparse
import time

import bench_report
import numpy as np
from bench_report import Report, ms
from bench_simulation import SimulatedEngine

from llmq.profiles.load.arrivals import Arrival
from llmq.runtime.policy import StepPolicy

PROMPT_TOKENS = 500


def measure(arguments: argparse.Namespace) -> Report:
    rows, figures = [], {}
    for case, num_waiting in (("nobody waits", 0), ("1,000 wait for blocks", 1000)):
        times_s = step_times_s(arguments.running, num_waiting, arguments.steps)
        median, p99 = (float(np.percentile(times_s, point)) for point in (50, 99))
        figures[case] = {"median_s": median, "mean_s": float(np.mean(times_s)), "p99_s": p99}
        rows.append([case, *map(ms, figures[case].values())])
    return Report(
        f"schedule() + update_from_output() at {arguments.running} running, {arguments.steps} decode steps",
        ["case", ">median", ">mean", ">p99"],
        rows,
        figures,
    )


def step_times_s(num_running: int, num_waiting: int, num_steps: int) -> list[float]:
    """Of decode steps; the time in which a model would compute is not counted."""
    tokens = PROMPT_TOKENS + num_steps + 10
    num_blocks = num_running * -(-tokens // 16) + 8
    policy = StepPolicy(max_num_seqs=num_running + num_waiting, max_num_batched_tokens=num_running * PROMPT_TOKENS)
    engine = SimulatedEngine(policy, num_blocks=num_blocks, max_tokens=num_steps + 10, enable_prefix_caching=True)
    for number in range(num_running + num_waiting):
        engine.add(number, Arrival(0.0, PROMPT_TOKENS, num_steps + 10))
    engine.step()
    if len(engine.scheduler.running) != num_running:
        raise AssertionError(f"{len(engine.scheduler.running)} are running, not {num_running}")
    times_s = []
    for _ in range(num_steps):
        started_s = time.thread_time()
        plan = engine.scheduler.schedule()
        scheduled_s = time.thread_time()
        result = engine.execute(plan)
        resumed_s = time.thread_time()
        engine.scheduler.update_from_output(plan, result)
        times_s.append(scheduled_s - started_s + time.thread_time() - resumed_s)
    return times_s


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--running", type=int, default=256)
    options.add_argument("--steps", type=int, default=300)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
