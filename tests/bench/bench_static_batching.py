"""Continuous against static batching: the same runtime, trace and p99 TPOT, the static side's batch size tuned.

Simulated: the real Scheduler, all requests queued at once, the time of a step from a cost model (an 8B bf16 model on an
H100 by its roofline). Static batching takes its best batch size; continuous batching then gets its best throughput
among all settings whose p99 TPOT is at most static's, twice and four times that: static batching computes no prompt
while it decodes, which makes its TPOT low and its throughput what it is. With --model also a small run of the engine.
"""

import argparse
import time
from dataclasses import dataclass, replace

import bench_report
import numpy as np
from bench_report import Report, ms, whole_numbers
from bench_simulation import H100_8B, SimulatedEngine, StepCost

from llmq.profiles.load.arrivals import Arrival, read_trace
from llmq.runtime.policy import StepPolicy

TPOT_FACTORS = (1, 2, 4)
NO_LIMIT = 1_000_000  # tokens a step: static batching computes all its prompts at once


@dataclass(frozen=True)
class Outcome:
    policy: StepPolicy
    tokens_per_s: float
    tpot_p99_s: float

    def figures(self) -> dict[str, float]:
        return {
            "max_num_seqs": self.policy.max_num_seqs,
            "max_num_batched_tokens": self.policy.max_num_batched_tokens,
            "tokens_per_s": self.tokens_per_s,
            "tpot_p99_s": self.tpot_p99_s,
        }


class Clock:
    """When each request got its first and its last token: throughput and TPOT from these."""

    def __init__(self) -> None:
        self.first_s: dict[str, float] = {}
        self.last_s: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, outputs, now_s: float) -> None:
        for output in outputs:
            if output.new_token_ids:
                self.first_s.setdefault(output.request_id, now_s)
                self.last_s[output.request_id] = now_s
                self.counts[output.request_id] = self.counts.get(output.request_id, 0) + len(output.new_token_ids)

    def outcome(self, policy: StepPolicy, duration_s: float) -> Outcome:
        tpots = [
            (self.last_s[name] - self.first_s[name]) / (count - 1) for name, count in self.counts.items() if count > 1
        ]
        return Outcome(policy, sum(self.counts.values()) / duration_s, float(np.percentile(tpots, 99)))


def simulate(lengths: list[Arrival], policy: StepPolicy, capacity_tokens: int, cost: StepCost) -> Outcome:
    engine = SimulatedEngine(policy, num_blocks=capacity_tokens // 16)
    engine.add_all(lengths)
    clock, now_s = Clock(), 0.0
    while engine.scheduler.has_requests:
        plan, outputs = engine.step()
        now_s += cost.step_s(plan)
        clock.add(outputs, now_s)
    return clock.outcome(policy, now_s)


def compare(run, batch_sizes: list[int], budgets: list[int]) -> tuple[Outcome, dict[int, Outcome | None]]:
    """(the best static outcome, the best continuous one within so many times its p99 TPOT). `run` makes a policy an
    Outcome."""
    static = max(
        (
            run(StepPolicy(max_num_seqs=size, max_num_batched_tokens=NO_LIMIT, admit_while_running=False))
            for size in batch_sizes
        ),
        key=lambda one: one.tokens_per_s,
    )
    tried = [
        run(StepPolicy(max_num_seqs=size, max_num_batched_tokens=budget)) for size in batch_sizes for budget in budgets
    ]
    best = {}
    for factor in TPOT_FACTORS:
        within = [one for one in tried if one.tpot_p99_s <= factor * static.tpot_p99_s]
        best[factor] = max(within, key=lambda one: one.tokens_per_s, default=None)
    return static, best


def measure(arguments: argparse.Namespace) -> Report:
    trace = read_trace(bench_report.trace_path("azure_llm_2023_conv.csv"))
    rows, figures = [], {}

    def add(name: str, outcomes: tuple[Outcome, dict[int, Outcome | None]]) -> None:
        static, continuous = outcomes
        figures[name] = {"static": static.figures(), "continuous": {}}
        rows.append([name, "static, tuned", *_cells(static), "1.00×"])
        for factor, one in continuous.items():
            case = f"continuous, p99 TPOT at most {factor}×"
            if one is None:
                rows.append([name, case, "none", "", "", "", ""])
                continue
            ratio = one.tokens_per_s / static.tokens_per_s
            figures[name]["continuous"][str(factor)] = one.figures() | {"ratio": ratio}
            rows.append([name, case, *_cells(one), f"{ratio:.2f}×"])

    lengths = trace[: arguments.requests]
    add(
        "simulated",
        compare(
            lambda policy: simulate(lengths, policy, arguments.capacity_tokens, H100_8B),
            arguments.batch_sizes,
            arguments.budgets,
        ),
    )
    if arguments.model:
        engine = RealEngine(arguments.model, trace[: arguments.real_requests], arguments.real_scale)
        add(f"measured, {arguments.model}", compare(engine.run, arguments.real_batch_sizes, arguments.real_budgets))
    return Report(
        f"Azure conversation lengths, {len(lengths)} requests queued at once",
        ["run", "batching", ">max_num_seqs", ">tokens a step", ">tokens/s", ">p99 TPOT", ">ratio"],
        rows,
        figures,
    )


def _cells(one: Outcome) -> list[str]:
    budget = one.policy.max_num_batched_tokens
    return [
        str(one.policy.max_num_seqs),
        "all prompts" if budget == NO_LIMIT else str(budget),
        f"{one.tokens_per_s:.0f}",
        ms(one.tpot_p99_s),
    ]


class RealEngine:
    """The engine in this process on a real model; lengths are `scale` of the trace's."""

    def __init__(self, model: str, trace: list[Arrival], scale: float) -> None:
        from llmq.profiles.checkpoint import find_model
        from llmq.runtime.config import EngineConfig
        from llmq.runtime.engine import Engine

        self._engine = Engine.from_config(
            EngineConfig(model=str(find_model(model)), threads=1, enable_prefix_caching=False)
        )
        self._lengths = [
            replace(
                one,
                num_prompt_tokens=max(1, int(one.num_prompt_tokens * scale)),
                num_output_tokens=max(2, int(one.num_output_tokens * scale)),
            )
            for one in trace
        ]

    def run(self, policy: StepPolicy) -> Outcome:
        from llmq.profiles.load.generator import random_prompt_ids
        from llmq.runtime.request import EngineRequest
        from llmq.runtime.sampling_params import SamplingParams

        self._engine.scheduler.policy = policy
        for number, one in enumerate(self._lengths):
            ids = random_prompt_ids(number, one.num_prompt_tokens, self._engine.info.vocab_size)
            params = SamplingParams(temperature=0.0, max_tokens=one.num_output_tokens, ignore_eos=True)
            self._engine.add_request(
                EngineRequest(
                    request_id=str(number), prompt_token_ids=ids, sampling_params=params, arrival_time_s=number
                )
            )
        clock, started_s = Clock(), time.perf_counter()
        while self._engine.has_unfinished_requests:
            clock.add(self._engine.step(), time.perf_counter())
        return clock.outcome(policy, time.perf_counter() - started_s)


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--requests", type=int, default=600)
    options.add_argument("--capacity-tokens", type=int, default=400_000)
    options.add_argument("--batch-sizes", type=whole_numbers, default=[16, 32, 64, 128, 256])
    options.add_argument("--budgets", type=whole_numbers, default=[128, 256, 512, 1024])
    options.add_argument("--model", help="also measure this model, such as smollm2-135m")
    options.add_argument("--real-requests", type=int, default=24)
    options.add_argument("--real-scale", type=float, default=0.0625)
    options.add_argument("--real-batch-sizes", type=whole_numbers, default=[4, 8, 16])
    options.add_argument("--real-budgets", type=whole_numbers, default=[64, 256])
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
