"""Where a step's time goes: operations of the native program, the head, the sampler, and what Python does around them.

A clock is read between operations, which costs a step about 20 µs. Figures are means over the steps, so that parts add
up to the whole.

    python tests/bench/bench_step.py smol-4bit --batch 1 --threads 2
    python tests/bench/bench_step.py smol-4bit --prefill 1024 --activations int8
"""

import argparse
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
    """Adds up what wrapped functions take."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed


def run_steps(engine: Engine, arguments: argparse.Namespace) -> tuple[int, float, Counter[str]]:
    """Steps of the measured kind: how many, seconds of all, and of parts outside the program."""
    num_rows, num_prompt = (1, arguments.prefill) if arguments.prefill else (arguments.batch, arguments.context)
    num_tokens = 1 if arguments.prefill else arguments.tokens
    for row in range(num_rows):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        engine.add_request(
            EngineRequest(
                request_id=str(row),
                prompt_token_ids=[token % 500 for token in prompt_of(num_prompt, row)],
                sampling_params=params,
            )
        )
    if not arguments.prefill:
        while any(one.num_computed_tokens < one.num_prompt_tokens for one in _requests(engine)):
            engine.step()
    runner = engine.executor.runner
    runner.program.start_timing()
    watch = Stopwatch()
    sampler, logits = runner.sampler, runner.program.logits
    runner.sampler, runner.program.logits = watch.wrapped("sampler", sampler), watch.wrapped("head", logits)
    steps, start = 0, time.perf_counter()
    while engine.has_unfinished_requests:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - start
    runner.sampler, runner.program.logits = sampler, logits
    return steps, seconds, watch.seconds


def _requests(engine: Engine) -> list[Any]:
    return [*engine.scheduler.waiting, *engine.scheduler.running]


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
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        )
    )
    program = engine.executor.runner.program
    if program.name != "native":
        raise SystemExit(f"{arguments.model} has no native program: {program.name}")
    run_steps(engine, arguments)  # everything is paged in and grown
    steps, seconds, parts = run_steps(engine, arguments)
    for operation, spent in program.operation_times():
        parts[operation] += spent
    parts["the rest: scheduling, inputs, outputs"] = seconds - sum(parts.values())
    work = f"prefill of {arguments.prefill}" if arguments.prefill else f"decode of {arguments.batch}"
    return Report(
        f"{work}, {arguments.threads} thread(s), {engine.info.fingerprint['linear_kernels']}, head "
        f"{engine.info.fingerprint['head']}: {steps} steps of {1000 * seconds / steps:.2f} ms",
        ["part", ">ms a step", ">share"],
        [[name, f"{1000 * spent / steps:.3f}", percent(spent / seconds)] for name, spent in parts.most_common()],
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
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
