"""Speculation on real prompts: tokens a pass, and speed against the same engine without, interleaved.

Prompts are HumanEval's functions (code), GSM8K's questions and MT-Bench's first turns, as chats, answered greedily and
`batch` at once. Off and on take turns over the same prompts; the ratio of a turn is on / off in tokens a second, and
the median of the turns is shown with the least and the most. A pass is a request's share of a step in which it decodes.

    python tests/bench/bench_speculative.py smollm2-135m --threads 2 --methods ngram,auto --batch 1,4,16
    python tests/bench/bench_speculative.py MODEL --drafter MODEL-IN-4-BITS --methods draft,auto
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import bench_report
from bench_report import Report
from kept_pieces import KeptPieces, Piece

from llmq.cli import console
from llmq.profiles.checkpoint import find_model
from llmq.runtime.config import EngineConfig, Speculation
from llmq.runtime.engine import Engine
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

OFF = "off"
TEXTS = {
    "code": ("tasks", "humaneval.jsonl"),
    "gsm8k": ("tasks", "gsm8k.test.jsonl"),
    "chat": ("chat", "mt_bench.jsonl"),
}


def texts(workload: str) -> Iterator[str]:
    with open(bench_report.shared_path(*TEXTS[workload]), encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if workload == "code":
                yield f"Write the whole function, with its signature and docstring.\n\n```python\n{line['prompt']}```"
            else:
                yield line["question"] if workload == "gsm8k" else line["turns"][0]


@dataclass
class Turn:
    """All prompts of a workload once, `batch` at a time."""

    seconds: float
    num_tokens: int
    passes: int
    draft_tokens: int
    accepted: int
    token_ids: list[list[int]]


class Engines:
    """One for each method, so that turns change nothing but which of them runs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.folder = find_model(arguments.model)
        self.tokenizer = Tokenizer.from_folder(self.folder)
        self._made: dict[str, Engine] = {}
        self._clock = time.process_time if arguments.cpu_time else time.perf_counter

    def __getitem__(self, method: str) -> Engine:
        if method not in self._made:
            self._made[method] = Engine.from_config(self._config(method))
        return self._made[method]

    def _config(self, method: str) -> EngineConfig:
        arguments, speculation = self._arguments, None
        if method != OFF:
            drafter = None if method == "ngram" or arguments.drafter is None else str(find_model(arguments.drafter))
            adaptive = method == "auto"
            speculation = Speculation(
                method="ngram" if drafter is None else "draft",
                num_tokens=8 if adaptive else arguments.num_tokens,
                adaptive=adaptive,
                draft_model=drafter,
            )
        return EngineConfig(
            model=str(self.folder),
            dtype="bf16",
            threads=arguments.threads,
            max_model_len=arguments.prompt_tokens + arguments.tokens,
            max_num_seqs=max(arguments.batch),
            kv_cache_memory_bytes=arguments.kv_mib << 20,
            enable_prefix_caching=False,
            speculation=speculation,
        )

    def turn(self, method: str, workload: str, batch: int) -> Turn:
        engine, made = self[method], Turn(0.0, 0, 0, 0, 0, [])
        chosen = list(itertools.islice(texts(workload), max(self._arguments.prompts, batch)))
        for start in range(0, len(chosen), batch):
            prompts = [self._prompt(text) for text in chosen[start : start + batch]]
            self._answer(engine, prompts, made)
        return made

    def _prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode_chat([{"role": "user", "content": text}])[: self._arguments.prompt_tokens]

    def _answer(self, engine: Engine, prompts: list[list[int]], made: Turn) -> None:
        """Timed from the first token of the last prompt on: what speculation is about."""
        params = SamplingParams(temperature=0.0, max_tokens=self._arguments.tokens)
        written: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            engine.add_request(EngineRequest(request_id=str(row), prompt_token_ids=prompt, sampling_params=params))
        before, start = engine.stats(), None
        while engine.has_unfinished_requests:
            if start is None and len(written) == len(prompts):
                start, counted = self._clock(), sum(map(len, written.values()))
            outputs = engine.step()
            for output in outputs:
                written.setdefault(output.request_id, []).extend(output.new_token_ids)
                made.passes += start is not None
        if start is None:
            return
        made.seconds += self._clock() - start
        made.num_tokens += sum(map(len, written.values())) - counted
        after = engine.stats()
        made.draft_tokens += after.draft_tokens - before.draft_tokens
        made.accepted += after.accepted_draft_tokens - before.accepted_draft_tokens
        made.token_ids += [written[str(row)] for row in range(len(prompts))]


def compare(engines: Engines, method: str, workload: str, batch: int, repeats: int) -> Piece:
    """Turns of off and on; the first of each is not counted, where an engine is more than once asked for the same."""
    pairs = []
    for _ in range(repeats):
        pairs.append((engines.turn(OFF, workload, batch), engines.turn(method, workload, batch)))
    ratios = sorted(on.num_tokens / on.seconds / (off.num_tokens / off.seconds) for off, on in pairs)
    off, on = pairs[0]
    return {
        "off_tokens_per_s": median(one.num_tokens / one.seconds for one, _ in pairs),
        "on_tokens_per_s": median(one.num_tokens / one.seconds for _, one in pairs),
        "ratio": median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "tokens_per_pass": on.num_tokens / on.passes,
        "draft_tokens": on.draft_tokens,
        "accepted": on.accepted,
        "different_texts": sum(a != b for a, b in zip(off.token_ids, on.token_ids, strict=True)),
        "num_texts": len(on.token_ids),
    }


def measure(arguments: argparse.Namespace) -> Report:
    told = ("model", "drafter", "threads", "tokens", "prompts", "num_tokens", "repeats", "cpu_time")
    kept = KeptPieces(arguments.work, {name: getattr(arguments, name) for name in told})
    engines, figures, rows = Engines(arguments), {}, []
    for workload, method, batch in itertools.product(arguments.workloads, arguments.methods, arguments.batch):
        name = f"{workload}.{method}.batch-{batch}"
        one = kept.get(name, lambda w=workload, m=method, b=batch: compare(engines, m, w, b, arguments.repeats))
        console.status(f"{name}: {one['ratio']:.2f} times as fast, {one['tokens_per_pass']:.2f} tokens a pass")
        figures[name] = one
        share = bench_report.percent(one["accepted"] / one["draft_tokens"]) if one["draft_tokens"] else ""
        rows.append(
            [
                *(workload, method, batch, f"{one['off_tokens_per_s']:.1f}", f"{one['on_tokens_per_s']:.1f}"),
                *(f"{one['ratio']:.2f}", f"{one['least']:.2f}–{one['most']:.2f}", f"{one['tokens_per_pass']:.2f}"),
                *(share, f"{one['different_texts']} of {one['num_texts']}"),
            ]
        )
    return Report(
        f"{arguments.model}, {arguments.threads} thread(s), {arguments.tokens} tokens an answer"
        + (f", guessed by {arguments.drafter}" if arguments.drafter else ""),
        [
            "prompts",
            "method",
            ">batch",
            ">off tok/s",
            ">on tok/s",
            ">ratio",
            ">turns",
            ">tokens a pass",
            ">right",
            ">differ",
        ],
        rows,
        figures,
    )


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("model")
    options.add_argument("--drafter", help="what guesses in draft, and in auto where it is given")
    options.add_argument("--methods", type=bench_report.names, default=["ngram", "auto"])
    options.add_argument("--workloads", type=bench_report.names, default=list(TEXTS))
    options.add_argument("--batch", type=bench_report.whole_numbers, default=[1, 4, 16])
    options.add_argument("--prompts", type=int, default=8, help="of each workload, at least a batch")
    options.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    options.add_argument("--prompt-tokens", type=int, default=1024, help="of a prompt: longer ones are cut")
    options.add_argument("--num-tokens", type=int, default=4, help="guessed at once by ngram and draft")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--kv-mib", type=int, default=1024)
    options.add_argument("--work", type=Path, help="folder in which each row is kept, for a run that goes on")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--cpu-time", action="store_true", help="of one thread, on a machine that others use too")
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
