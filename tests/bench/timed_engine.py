"""The engine's process of a server, with clocks around what a step computes: run by `bench_http_overhead.py`.

After each step its totals lie in the file $LLMQ_BENCH_TOTALS as doubles: steps, tokens that they computed, seconds of
wall-clock time and of CPU time (of all threads) inside the executor, and CPU time of the whole process.
"""

import mmap
import os
import struct
import sys
import time
from concurrent.futures import Future

from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.engine_process import main
from llmq.runtime.scheduler_output import SchedulerOutput, StepResult

TOTALS = struct.Struct("5d")


def make_engine(config: EngineConfig) -> Engine:
    engine = Engine.from_config(config)
    with open(os.environ["LLMQ_BENCH_TOTALS"], "r+b") as file:
        shared = mmap.mmap(file.fileno(), TOTALS.size)
    inner, totals = engine.executor.submit, [0.0] * 4

    def submit(plan: SchedulerOutput) -> "Future[StepResult]":
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        future = inner(plan)
        now_s = time.process_time()
        totals[0] += 1
        totals[1] += plan.num_scheduled_tokens
        totals[2] += time.perf_counter() - wall_s
        totals[3] += now_s - cpu_s
        TOTALS.pack_into(shared, 0, *totals, now_s)
        return future

    engine.executor.submit = submit
    return engine


if __name__ == "__main__":
    sys.exit(main(make_engine))
