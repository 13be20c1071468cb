"""ITL of running streams while a long prompt arrives, on the engine in this process.

The streams run alone first; then the prompt comes, and what counts is each step until it is computed. Nobody should
wait longer than alone by more than what one chunk takes: the time of a whole chunk with no stream beside it. With
--threads 1 in CPU time, which is the same on a machine of its own, and tells something on one that is not. Both are
done --repeats times in turn, and each step is the median of its repetitions: one hiccup of the machine is not a worst.
"""

import argparse
import time
from collections.abc import Callable

import bench_report
import numpy as np
from bench_report import Report, ms

from llmq.profiles.load.generator import random_prompt_ids

Clock = Callable[[], float]


def measure(arguments: argparse.Namespace) -> Report:
    from llmq.profiles.checkpoint import find_model
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.engine import Engine

    engine = Engine.from_config(
        EngineConfig(
            model=str(find_model(arguments.model)),
            threads=arguments.threads,
            max_num_seqs=arguments.streams + 1,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            enable_prefix_caching=False,
        )
    )
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    rounds = [
        (prompt_steps_s(engine, arguments.prompt_tokens, clock), *streams_s(engine, arguments, clock))
        for _ in range(arguments.repeats)
    ]
    chunks_s, alone_s, during_s = (np.median(steps, axis=0).tolist() for steps in zip(*rounds, strict=True))
    figures = {
        "alone": _figures(alone_s),
        "during": _figures(during_s),
        "chunk": _figures(chunks_s),
        "worst_over_alone_s": max(during_s) - float(np.median(alone_s)),
        "median_over_alone_s": float(np.median(during_s)) - float(np.median(alone_s)),
    }
    rows = [
        [name, len(steps), ms(float(np.median(steps))), ms(max(steps))]
        for name, steps in (
            ("streams alone", alone_s),
            ("streams while the prompt is computed", during_s),
            ("the prompt alone, a chunk", chunks_s),
        )
    ]
    return Report(
        f"ITL of {arguments.streams} streams, a prompt of {arguments.prompt_tokens} tokens, "
        f"{arguments.max_num_batched_tokens} tokens a step",
        ["case", ">steps", ">median", ">worst"],
        rows,
        figures,
        [
            f"ITL against the median alone: {ms(figures['median_over_alone_s'])} more at the median, "
            f"{ms(figures['worst_over_alone_s'])} more at worst; a chunk alone takes {ms(figures['chunk']['worst_s'])}"
        ],
    )


def prompt_steps_s(engine, num_tokens: int, clock: Clock) -> list[float]:
    """The time of each step that computes the prompt with nothing beside it."""
    _add(engine, "alone", num_tokens, 1)
    times_s = []
    while engine.has_unfinished_requests:
        times_s.append(_step_s(engine, clock))
    return times_s


def streams_s(engine, arguments: argparse.Namespace, clock: Clock) -> tuple[list[float], list[float]]:
    """Steps of the streams alone, then until the prompt's first token has come: every step brings each stream one."""
    names = [f"stream {number}" for number in range(arguments.streams)]
    for name in names:
        _add(engine, name, arguments.stream_tokens, engine.info.max_model_len - arguments.stream_tokens)
    while any(request.num_output_tokens == 0 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    alone_s = [_step_s(engine, clock) for _ in range(arguments.alone_steps)]
    _add(engine, "long", arguments.prompt_tokens, 1)
    during_s, finished = [], False
    while not finished:
        started_s = clock()
        outputs = engine.step()
        during_s.append(clock() - started_s)
        if not set(names) <= {output.request_id for output in outputs}:
            raise AssertionError("a step brought a stream nothing")
        finished = any(output.request_id == "long" and output.finish_reason for output in outputs)
    engine.abort(names)
    return alone_s, during_s


def _step_s(engine, clock: Clock) -> float:
    started_s = clock()
    engine.step()
    return clock() - started_s


def _add(engine, name: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
    from llmq.runtime.request import EngineRequest
    from llmq.runtime.sampling_params import SamplingParams

    engine.add_request(
        EngineRequest(
            request_id=name,
            prompt_token_ids=random_prompt_ids(len(name), num_prompt_tokens, engine.info.vocab_size),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True),
            arrival_time_s=time.monotonic(),
        )
    )


def _figures(times_s: list[float]) -> dict[str, float]:
    return {"steps": len(times_s), "median_s": float(np.median(times_s)), "worst_s": max(times_s)}


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--threads", type=int, default=None)
    options.add_argument("--streams", type=int, default=4)
    options.add_argument("--stream-tokens", type=int, default=64)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--alone-steps", type=int, default=50)
    options.add_argument("--prompt-tokens", type=int, default=8000)
    options.add_argument("--max-num-batched-tokens", type=int, default=512)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
