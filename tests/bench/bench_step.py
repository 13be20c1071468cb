"""Where a step's time goes: operations of the native program, the head, the sampler, and what Python does around them.

Of each part the fastest step is shown, since other work on the machine falls on some steps only: so the parts' sum is
less than what a step takes on average. A clock is read between operations, which costs a step about 20 µs.

    python tests/bench/bench_step.py smol-4bit --batch 1 --threads 2
    python tests/bench/bench_step.py smol-4bit --prefill 1024 --activations int8
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import bench_report
from bench_decode import prompt_of
from bench_report import Report, percent

from llmq.profiles.checkpoint import find_model
from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams


class Stopwatch:
    """The least that a wrapped function took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            made = function(*arguments)
            self.seconds[name] = min(self.seconds.get(name, math.inf), time.perf_counter() - start)
            return made

        return timed


def add_requests(engine: Engine, arguments: argparse.Namespace) -> None:
    num_rows, num_prompt = (1, arguments.prefill) if arguments.prefill else (arguments.batch, arguments.context)
    params = SamplingParams(temperature=0.0, max_tokens=1 if arguments.prefill else arguments.tokens, ignore_eos=True)
    for row in range(num_rows):
        prompt = [token % 500 for token in prompt_of(num_prompt, row)]
        engine.add_request(EngineRequest(request_id=str(row), prompt_token_ids=prompt, sampling_params=params))
    requests = engine.scheduler.running
    while not arguments.prefill and (
        engine.scheduler.waiting or any(one.num_computed_tokens < one.num_prompt_tokens for one in requests)
    ):
        engine.step()


def fastest(engine: Engine, arguments: argparse.Namespace) -> tuple[int, dict[str, float]]:
    """How many steps of the measured kind there were, and the least seconds of each part, of the whole as ""."""
    runner, watch, steps = engine.executor.runner, Stopwatch(), 0
    operations: list[tuple[str, float]] = []
    launch, logits = runner.sampler.launch, runner.program.logits
    for _ in range(arguments.turns):
        add_requests(engine, arguments)
        runner.sampler.launch, runner.program.logits = watch.wrapped("sampler", launch), watch.wrapped("head", logits)
        step, steps_before = watch.wrapped("", engine.step), steps
        runner.program.start_timing()
        while arguments.prefill or len(engine.scheduler.running) == arguments.batch:
            if not engine.has_unfinished_requests:
                break
            step()
            steps += 1
        timed = runner.program.operation_times()
        if steps > steps_before:
            before = dict(enumerate(seconds for _, seconds in operations))
            operations = [
                (name, min(seconds, before.get(index, math.inf))) for index, (name, seconds) in enumerate(timed)
            ]
        runner.sampler.launch, runner.program.logits = launch, logits
        while engine.has_unfinished_requests:
            engine.step()
    parts = Counter(watch.seconds)
    for name, seconds in operations:
        parts[name] += seconds
    return steps, dict(parts)


def measure(arguments: argparse.Namespace) -> Report:
    engine = Engine.from_config(
        EngineConfig(
            model=str(find_model(arguments.model)),
            dtype="bf16",
            kv_dtype=arguments.kv_dtype,
            kernels="native",
            head=arguments.head,
            activations=arguments.activations,
            threads=arguments.threads,
            max_model_len=max(arguments.prefill + 8, arguments.context + arguments.tokens + 8),
            max_num_seqs=arguments.batch,
            max_num_batched_tokens=max(512, arguments.prefill),
            enable_prefix_caching=False,
        )
    )
    program = engine.executor.runner.program
    if program.name != "native":
        raise SystemExit(f"{arguments.model} has no native program: {program.name}")
    fastest(engine, arguments)  # everything is paged in and grown
    steps, found = fastest(engine, arguments)
    seconds, parts = found.pop(""), Counter(found)
    parts["the rest: scheduling, inputs, outputs"] = max(0.0, seconds - sum(parts.values()))
    work = f"prefill of {arguments.prefill}" if arguments.prefill else f"decode of {arguments.batch}"
    return Report(
        f"{work}, {arguments.threads} thread(s), {engine.info.fingerprint['linear_kernels']}, head "
        f"{engine.info.fingerprint['head']}: the fastest of {steps} steps took {1000 * seconds:.2f} ms",
        ["part", ">ms", ">share"],
        [[name, f"{1000 * spent:.3f}", percent(spent / seconds)] for name, spent in parts.most_common()],
        {"steps": steps, "seconds": seconds, "parts_s": dict(parts)},
    )


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("model", nargs="?", default="smollm2-135m")
    options.add_argument("--batch", type=int, default=1, help="Sequences that decode at once.")
    options.add_argument("--prefill", type=int, default=0, help="Instead: a prompt of so many tokens.")
    options.add_argument("--context", type=int, default=128, help="Prompt tokens of what decodes.")
    options.add_argument("--tokens", type=int, default=64, help="Tokens that each sequence generates.")
    options.add_argument("--kv-dtype", default="bf16")
    options.add_argument("--head", default="auto")
    options.add_argument("--activations", default="auto")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--turns", type=int, default=3)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
