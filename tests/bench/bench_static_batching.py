"""Continuous against static batching: the same runtime, trace and p99 TPOT, the static side's batch size tuned.

All requests are queued at once. What counts is the throughput that each way reaches within a limit on the p99 of the
time per output token. The limits are those that static batching itself sets, one for each of its batch sizes, and none;
within each, the best batch size of static and the best setting of continuous batching are compared. Static batching
computes no prompt while it decodes, which keeps its TPOT low: what prompts take is in its time to first token alone.

Simulated: the real Scheduler, the time of a step from the roofline of an 8B bf16 model on an H100. With --model also
the engine, in CPU time of its thread (other work on the machine does not count), and a simulation of more requests with
a step's cost fitted to the steps of that run.
"""

import argparse
import time
from dataclasses import asdict, dataclass, replace

import bench_report
import numpy as np
from bench_report import Report, ms, whole_numbers
from bench_simulation import H100_8B, SimulatedEngine

from llmq.profiles.load.arrivals import Arrival, read_trace
from llmq.profiles.step_cost import StepCost, StepShape
from llmq.runtime.policy import StepPolicy, step_shape

NO_LIMIT = 1_000_000  # tokens a step: static batching computes all its prompts at once


@dataclass(frozen=True)
class Outcome:
    policy: StepPolicy
    tokens_per_s: float
    tpot_p99_s: float
    ttft_p50_s: float

    def figures(self) -> dict[str, float]:
        return {
            "max_num_seqs": self.policy.max_num_seqs,
            "max_num_batched_tokens": self.policy.max_num_batched_tokens,
            "tokens_per_s": self.tokens_per_s,
            "tpot_p99_s": self.tpot_p99_s,
            "ttft_p50_s": self.ttft_p50_s,
        }


class Clock:
    """When each request got its first and its last token, from the start: throughput, TPOT and TTFT from these."""

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
        return Outcome(
            policy,
            tokens_per_s=sum(self.counts.values()) / duration_s,
            tpot_p99_s=float(np.percentile(tpots, 99)),
            ttft_p50_s=float(np.median(list(self.first_s.values()))),
        )


def simulate(lengths: list[Arrival], policy: StepPolicy, capacity_tokens: int, cost: StepCost) -> Outcome:
    engine = SimulatedEngine(policy, num_blocks=capacity_tokens // 16)
    engine.add_all(lengths)
    clock, now_s = Clock(), 0.0
    while engine.scheduler.has_requests:
        plan, outputs = engine.step()
        now_s += cost.step_s(step_shape(plan))
        clock.add(outputs, now_s)
    return clock.outcome(policy, now_s)


def compare(run, batch_sizes: list[int], budgets: list[int]) -> list[tuple[Outcome, Outcome | None]]:
    """(the best static outcome, the best continuous one) below each limit on p99 TPOT that a static batch size sets,
    and without one. `run` makes a policy an Outcome."""
    static = [
        run(StepPolicy(max_num_seqs=size, max_num_batched_tokens=NO_LIMIT, admit_while_running=False))
        for size in batch_sizes
    ]
    continuous = [
        run(StepPolicy(max_num_seqs=size, max_num_batched_tokens=budget))
        for size in batch_sizes
        for budget in budgets
        if size <= budget
    ]
    pairs = []
    for limit_s in [*sorted(one.tpot_p99_s for one in static), float("inf")]:
        bests = [
            max((o for o in outcomes if o.tpot_p99_s <= limit_s), key=lambda one: one.tokens_per_s, default=None)
            for outcomes in (static, continuous)
        ]
        pairs.append(tuple(bests))
    return pairs


def measure(arguments: argparse.Namespace) -> Report:
    trace = read_trace(bench_report.trace_path("azure_llm_2023_conv.csv"))
    rows, figures = [], {}

    def add(name: str, pairs: list[tuple[Outcome, Outcome | None]]) -> None:
        figures[name] = []
        for static, continuous in pairs:
            ratio = continuous and continuous.tokens_per_s / static.tokens_per_s
            figures[name].append(
                {"static": static.figures(), "continuous": continuous and continuous.figures(), "ratio": ratio}
            )
            rows.append([name, "static", *_cells(static), ""])
            rows.append(["", "continuous", *(_cells(continuous) if continuous else 5 * [""]), f"{ratio or 0:.2f}×"])

    lengths = trace[: arguments.requests]
    add(
        "H100, 8B, simulated",
        compare(
            lambda policy: simulate(lengths, policy, arguments.capacity_tokens, H100_8B),
            arguments.batch_sizes,
            arguments.budgets,
        ),
    )
    if arguments.model:
        scaled = [_scaled(one, arguments.real_scale) for one in trace]
        engine = RealEngine(arguments.model, scaled[: arguments.real_requests])
        sizes, budgets = arguments.real_batch_sizes, arguments.real_budgets
        add(f"{arguments.model}, measured", compare(engine.run, sizes, budgets))
        cost = StepCost.fitted(engine.shapes, engine.times_s)
        figures["fitted"] = asdict(cost)
        more = scaled[: arguments.requests]
        add(
            f"{arguments.model}, simulated",
            compare(lambda policy: simulate(more, policy, arguments.capacity_tokens, cost), sizes, budgets),
        )
    return Report(
        f"Azure conversation lengths, {len(lengths)} requests queued at once",
        ["run", "batching", ">max_num_seqs", ">tokens a step", ">tokens/s", ">p99 TPOT", ">median TTFT", ">ratio"],
        rows,
        figures,
    )


def _scaled(one: Arrival, scale: float) -> Arrival:
    return replace(
        one,
        num_prompt_tokens=max(1, int(one.num_prompt_tokens * scale)),
        num_output_tokens=max(2, int(one.num_output_tokens * scale)),
    )


def _cells(one: Outcome) -> list[str]:
    budget = one.policy.max_num_batched_tokens
    return [
        str(one.policy.max_num_seqs),
        "all prompts" if budget == NO_LIMIT else str(budget),
        f"{one.tokens_per_s:.0f}",
        ms(one.tpot_p99_s),
        f"{one.ttft_p50_s:.1f} s",
    ]


class RealEngine:
    """The engine in this process on a real model, and the shape and time of each step that it ran."""

    def __init__(self, model: str, lengths: list[Arrival]) -> None:
        from llmq.profiles.checkpoint import find_model
        from llmq.runtime.config import EngineConfig
        from llmq.runtime.engine import Engine

        self._engine = Engine.from_config(
            EngineConfig(model=str(find_model(model)), threads=1, enable_prefix_caching=False)
        )
        self._lengths = lengths
        self.shapes: list[StepShape] = []
        self.times_s: list[float] = []
        submit = self._engine.executor.submit

        def watched(plan):
            self.shapes.append(step_shape(plan))
            return submit(plan)

        self._engine.executor.submit = watched

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
        clock, now_s = Clock(), 0.0
        while self._engine.has_unfinished_requests:
            started_s = time.thread_time()
            outputs = self._engine.step()
            self.times_s.append(time.thread_time() - started_s)
            now_s += self.times_s[-1]
            clock.add(outputs, now_s)
        return clock.outcome(policy, now_s)


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--requests", type=int, default=600)
    options.add_argument("--capacity-tokens", type=int, default=400_000)
    options.add_argument("--batch-sizes", type=whole_numbers, default=[16, 24, 32, 64, 128, 256])
    options.add_argument("--budgets", type=whole_numbers, default=[128, 160, 256, 512])
    options.add_argument("--model", help="also measure this model, such as smollm2-135m")
    options.add_argument("--real-requests", type=int, default=32)
    options.add_argument("--real-scale", type=float, default=0.0625)
    options.add_argument("--real-batch-sizes", type=whole_numbers, default=[2, 4, 8, 16])
    options.add_argument("--real-budgets", type=whole_numbers, default=[16, 32, 64, 256])
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
