"""Speculation on real prompts: tokens a pass, and speed against the same model without, interleaved.

Prompts are HumanEval's functions (code), GSM8K's questions and MT-Bench's first turns, as chats, answered greedily and
`batch` at once. A method and off answer the same batch of prompts side by side, each by an engine of its own over the
same weights: a step of one, a step of the other, first the one and then the other first. So a machine that is slower
for some seconds is so for both, which would be most of what is measured if one batch followed the other. Timed are the
steps in which all places of both decode and neither computes a prompt: a batch that lasts as long as its slowest
answer, or a prompt whose answer is not waited for, would count against guesses that are right for others.

A method's ratio in a round is its tokens a second over off's, and the median of the rounds is shown with the least and
the most. Each batch of each round is a pair of its own: shown is the 95 % confidence interval of their mean ratio
(Student's t of its logarithm), and whether that is "slower", "faster", or, where 1 lies within, "not slower". Prompts
are in the prefix cache before. With --waves N a pair is N batches of prompts, each taking the place of one that is
answered, as in a server. A pass is a request's share of a step in which it decodes. First there is a round of
everything, then another one.

Methods: ngram, draft (by --drafter), w3 and w4 (by a copy of the model in so many bits), layers-N (by its first N
layers), each with --num-tokens guesses; auto and auto-METHOD guess as many as are worth their time.

    python tests/bench/bench_speculative.py smollm2-135m --threads 2 --methods ngram,auto --batch 1,4,16
    python tests/bench/bench_speculative.py MODEL --drafter MODEL-IN-4-BITS --methods draft,auto-draft
    python tests/bench/bench_speculative.py qwen2.5-coder-1.5b --methods w4,layers-14 --work FOLDER --minutes 20

With --llamacpp PYTHON and --gguf FILE (--prepare makes it of an alias) llama.cpp's prompt lookup takes turns too, at
batch 1 and against itself without; its PYTHON is that of `install.sh llamacpp` of the shared folder `peers`.
"""

import argparse
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import bench_report
import msgspec
from bench_report import Report
from kept_pieces import KeptPieces, Piece

from llmq.cli import console
from llmq.cli.drafter import quantized_copy
from llmq.profiles.checkpoint import find_model
from llmq.profiles.package_models import package_gguf
from llmq.runtime.config import EngineConfig, Speculation
from llmq.runtime.engine import Engine
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.pacer import Pacer
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import DraftTerms
from llmq.runtime.speculative.policy import DraftPolicy

HERE = Path(__file__).parent
OFF, LLAMACPP = "off", "llama.cpp"
ADAPTIVE_TOKENS = 8  # what `--speculative auto` guesses at most
# Of Student's t distribution with 1, 2, … degrees of freedom: 95 % lie within so many deviations.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
WARM_TOKENS = 4  # so that drafters have read the prompts too
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


class Prompts:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._tokenizer = arguments, Tokenizer.from_folder(folder)

    def groups(self, workload: str, batch: int) -> list[list[list[int]]]:
        """Token ids of prompts, `batch` in a group and wave."""
        size = batch * self._arguments.waves
        chosen = [self._prompt(text) for text in itertools.islice(texts(workload), max(self._arguments.prompts, size))]
        return [chosen[start : start + size] for start in range(0, len(chosen) - size + 1, size)]

    def _prompt(self, text: str) -> list[int]:
        return self._tokenizer.encode_chat([{"role": "user", "content": text}])[: self._arguments.prompt_tokens]


@dataclass(frozen=True)
class Method:
    name: str
    source: str  # what guesses: ngram, draft, w3, w4 or layers-N; "" for off
    is_adaptive: bool = False

    @classmethod
    def of(cls, name: str, arguments: argparse.Namespace) -> "Method":
        if name == OFF:
            return cls(name, "")
        if name == "auto":
            return cls(name, "ngram" if arguments.drafter is None else "draft", True)
        made = cls(name, name.removeprefix("auto-"), name.startswith("auto-"))
        is_layers = made.source.startswith("layers-") and made.source.removeprefix("layers-").isdigit()
        if made.source not in ("ngram", "draft", "w3", "w4") and not is_layers:
            sys.exit(f"--methods {name}: ngram, draft, w3, w4, layers-N, auto, or auto-ONE-OF-THEM")
        if made.source == "draft" and arguments.drafter is None:
            sys.exit(f"--methods {name}: by which model? Give --drafter")
        return made


@dataclass(frozen=True)
class _Host:
    """An engine with what it was made with."""

    engine: Engine
    pacer: Pacer | None


class Engines:
    """One without drafts and one for each that guesses, over weights that all of them map."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self.off = Method.of(OFF, arguments)
        self.methods = [Method.of(name, arguments) for name in arguments.methods]
        self._hosts: dict[str, _Host] = {}
        self._pacers: dict[str, Pacer] = {}
        self._warm: set[tuple[str, str, int]] = set()

    def of(self, method: Method) -> Engine:
        """An engine that guesses by `method` from now on."""
        host = self._host(method)
        host.engine.pacer = self._pacer(method, host) if method.is_adaptive else None
        self._guess(host.engine, 0 if method.is_adaptive or not method.source else self._arguments.num_tokens)
        return host.engine

    def warm(self, method: Method, workload: str, groups: list[list[list[int]]]) -> None:
        """Have prompts in the prefix cache of a method's engine, read by its drafter too."""
        key = (method.source, workload, len(groups[0]))
        if key in self._warm:
            return
        self._warm.add(key)
        engine = self.of(method)
        engine.pacer = None
        self._guess(engine, 1 if method.source else 0)
        for group in groups:
            answers = Answers(engine, group, WARM_TOKENS)
            while not answers.are_all:
                answers.step()

    def _host(self, method: Method) -> _Host:
        if method.source not in self._hosts:
            engine = Engine.from_config(self._config(method.source))
            self._hosts[method.source] = _Host(engine, engine.pacer)
        return self._hosts[method.source]

    def _pacer(self, method: Method, host: _Host) -> Pacer:
        if method.name not in self._pacers:
            model = host.pacer.model
            drafts = DraftPolicy(ADAPTIVE_TOKENS, model)
            self._pacers[method.name] = Pacer(model, host.pacer.most, time.monotonic, drafts=drafts)
        return self._pacers[method.name]

    @staticmethod
    def _guess(engine: Engine, num_tokens: int) -> None:
        policy = engine.scheduler.policy
        engine.scheduler.policy = msgspec.structs.replace(policy, drafts=DraftTerms(num_tokens=num_tokens))

    def _config(self, source: str) -> EngineConfig:
        arguments, folder, layers = self._arguments, None, None
        if source == "draft":
            folder = find_model(arguments.drafter)
        elif source in ("w3", "w4"):
            folder = quantized_copy(self._folder, source)
        elif source.startswith("layers-"):
            layers = int(source.removeprefix("layers-"))
        return EngineConfig(
            model=str(self._folder),
            dtype="bf16",
            threads=arguments.threads,
            max_model_len=arguments.prompt_tokens + arguments.tokens,
            max_num_seqs=max(arguments.batch),
            kv_cache_memory_bytes=arguments.kv_mib << 20,
            speculation=None
            if not source
            else Speculation(
                method="ngram" if source == "ngram" else "draft",
                num_tokens=max(ADAPTIVE_TOKENS, arguments.num_tokens),
                adaptive=any(one.is_adaptive and one.source == source for one in self.methods),
                draft_model=None if folder is None else str(folder),
                draft_layers=layers,
            ),
        )


_numbers = itertools.count()


class Answers:
    """An engine's answers to prompts, `at_once` of them (None: all) at any time."""

    def __init__(self, engine: Engine, prompts: list[list[int]], num_tokens: int, at_once: int | None = None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        self._engine, self._places = engine, len(prompts) if at_once is None else at_once
        self._written: dict[str, list[int]] = {str(next(_numbers)): [] for _ in prompts}
        self._waiting = deque(
            EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
            for name, prompt in zip(self._written, prompts, strict=True)
        )
        for _ in range(min(self._places, len(self._waiting))):
            engine.add_request(self._waiting.popleft())
        self._made = {"seconds": 0.0, "num_tokens": 0, "passes": 0, "draft_tokens": 0, "accepted": 0, "draft_s": 0.0}

    @property
    def are_all(self) -> bool:
        return not self._engine.has_unfinished_requests

    @property
    def all_decode(self) -> bool:
        running, waiting = self._engine.scheduler.running, self._engine.scheduler.waiting
        decoding = [one for one in running if one.num_computed_tokens >= one.num_prompt_tokens]
        return len(decoding) == len(running) == self._places and not waiting

    def step(self, *, is_timed: bool = False) -> None:
        if self._engine.pacer is not None:
            self._engine.pacer.rest()  # the other's step is none of its time
        before, began_s = self._engine.stats(), time.perf_counter()
        outputs = self._engine.step()
        if is_timed:
            after, made = self._engine.stats(), self._made
            made["seconds"] += time.perf_counter() - began_s
            made["num_tokens"] += sum(len(output.new_token_ids) for output in outputs)
            made["passes"] += len(outputs)
            made["draft_tokens"] += after.draft_tokens - before.draft_tokens
            made["accepted"] += after.accepted_draft_tokens - before.accepted_draft_tokens
            made["draft_s"] += after.draft_s - before.draft_s
        for output in outputs:
            self._written[output.request_id] += output.new_token_ids
            if output.finish_reason is not None and self._waiting:
                self._engine.add_request(self._waiting.popleft())

    def piece(self) -> Piece:
        made = self._made
        speed = made["num_tokens"] / made["seconds"] if made["seconds"] else 0.0
        return made | {"token_ids": list(self._written.values()), "speeds": [speed]}


def side_by_side(one: Answers, other: Answers) -> tuple[Piece, Piece]:
    """Step by step in turns, to the last answer."""
    turn = 0
    while not (one.are_all and other.are_all):
        is_timed = one.all_decode and other.all_decode
        for answers in _rotated([one, other], turn):
            if not answers.are_all:
                answers.step(is_timed=is_timed)
        turn += 1
    return one.piece(), other.piece()


def together(parts: list[Piece]) -> Piece:
    return {name: sum((part[name] for part in parts), start=type(first)()) for name, first in parts[0].items()}


class LlamaCpp:
    """Its process, asleep but while it answers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        context = arguments.prompt_tokens + arguments.tokens + arguments.num_tokens
        told = [arguments.gguf, context, arguments.num_tokens, arguments.threads]
        self._process = subprocess.Popen(
            list(map(str, (arguments.llamacpp, HERE / "peer_llamacpp_lookup.py", *told))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "passive"},
        )

    def run(self, prompts: list[list[int]], num_tokens: int, *, speculates: bool) -> Piece:
        job = {"prompts": prompts, "tokens": num_tokens, "speculates": speculates}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            sys.exit(f"llama.cpp's process ended with {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        folder = find_model(arguments.model)
        self.prompts, self.engines = Prompts(arguments, folder), Engines(arguments, folder)
        self._llamacpp: LlamaCpp | None = None

    def round(self, number: int, workload: str, batch: int) -> Piece:
        """What each method made of a workload's prompts, and off beside it."""
        groups, engines, made = self.prompts.groups(workload, batch), self.engines, {}
        engines.warm(engines.off, workload, groups)
        for method in _rotated(engines.methods, number):
            engines.warm(method, workload, groups)
            off, on = engines.of(engines.off), engines.of(method)
            pairs = [
                side_by_side(*(Answers(engine, group, self._arguments.tokens, batch) for engine in (off, on)))
                for group in groups
            ]
            made[_off(method.name)], made[method.name] = map(together, zip(*pairs, strict=True))
        if idle := [name for name, piece in made.items() if not piece["seconds"]]:
            sys.exit(f"{', '.join(idle)}: no step in which {batch} decode at once; try more --tokens or --kv-mib")
        if self._arguments.llamacpp is not None and batch == 1:
            self._llamacpp = self._llamacpp or LlamaCpp(self._arguments)
            prompts = [prompt for group in groups for prompt in group]
            for speculates in _rotated([False, True], number):
                name = LLAMACPP if speculates else _off(LLAMACPP)
                made[name] = self._llamacpp.run(prompts, self._arguments.tokens, speculates=speculates)
        return made

    def end(self) -> None:
        if self._llamacpp is not None:
            self._llamacpp.end()


def _off(name: str) -> str:
    """What the piece is called that is a method's other."""
    return f"{name} {OFF}"


def _rotated(items: list[Any], by: int) -> list[Any]:
    return items[by % len(items) :] + items[: by % len(items)]


def summary(rounds: list[Piece], name: str) -> Piece:
    """Of a method against off: the middle of the rounds."""
    pairs = [(made[_off(name)], made[name]) for made in rounds]
    ratios = sorted(_speed(on) / _speed(off) for off, on in pairs)
    on = together([on for _, on in pairs])
    texts = [(a, b) for off, on in pairs for a, b in zip(off["token_ids"], on["token_ids"], strict=True)]
    return {
        "off_tokens_per_s": median(_speed(off) for off, _ in pairs),
        "on_tokens_per_s": median(_speed(on) for _, on in pairs),
        "ratio": median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "rounds": len(rounds),
        **interval([b / a for off, on in pairs for a, b in zip(_speeds(off), _speeds(on), strict=True) if a and b]),
        "tokens_per_pass": on["num_tokens"] / on["passes"],
        "draft_tokens": on["draft_tokens"],
        "accepted": on.get("accepted"),  # llama.cpp does not say
        "draft_s_share": on["draft_s"] / on["seconds"] if "draft_s" in on else None,
        "different_texts": sum(a != b for a, b in texts),
        "num_texts": len(texts),
    }


def interval(ratios: list[float]) -> Piece:
    """The 95 % confidence interval of the mean of paired ratios, and what it says of who is slower."""
    if len(ratios) < 2:
        return {"pairs": len(ratios), "low": None, "high": None, "verdict": ""}
    logs = [math.log(ratio) for ratio in ratios]
    half = STUDENT[min(len(logs) - 2, len(STUDENT) - 1)] * stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(mean(logs) - half), math.exp(mean(logs) + half)
    verdict = "slower" if high < 1.0 else "faster" if low > 1.0 else "not slower"
    return {"pairs": len(logs), "low": low, "high": high, "verdict": verdict}


def _speed(made: Piece) -> float:
    return made["num_tokens"] / made["seconds"]


def _speeds(made: Piece) -> list[float]:
    return made.get("speeds") or [_speed(made)]


def measure(arguments: argparse.Namespace) -> Report:
    told = ("model", "drafter", "methods", "threads", "tokens", "prompts", "waves", "num_tokens", "llamacpp", "gguf")
    kept = KeptPieces(arguments.work, {name: _plain(getattr(arguments, name)) for name in told})
    began_s, bench = time.monotonic(), Bench(arguments)
    made: dict[tuple[str, int], list[Piece]] = {}
    parts = itertools.product(range(arguments.repeats), arguments.batch, arguments.workloads)
    try:
        for number, batch, workload in parts:
            name = f"{workload}.batch-{batch}.round-{number}"
            is_late = arguments.minutes is not None and time.monotonic() - began_s > 60 * arguments.minutes
            if is_late and kept.find(name) is None:
                continue
            console.status(f"{time.strftime('%H:%M:%S')}  {name}")
            piece = kept.get(name, lambda n=number, w=workload, b=batch: bench.round(n, w, b))
            made.setdefault((workload, batch), []).append(piece)
    finally:
        bench.end()
    return report(arguments, made)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def report(arguments: argparse.Namespace, made: dict[tuple[str, int], list[Piece]]) -> Report:
    figures, rows = {}, []
    for workload, (batch, method) in itertools.product(
        arguments.workloads, itertools.product(arguments.batch, (*arguments.methods, LLAMACPP))
    ):
        rounds = made.get((workload, batch), [])
        if not rounds or method not in rounds[0]:
            continue
        figures[f"{workload}.{method}.batch-{batch}"] = one = summary(rounds, method)
        right = one["accepted"] is not None and one["draft_tokens"]
        rows.append(
            [
                *(workload, method, batch, f"{one['off_tokens_per_s']:.1f}", f"{one['on_tokens_per_s']:.1f}"),
                *(f"{one['ratio']:.2f}", f"{one['least']:.2f}–{one['most']:.2f}", one["rounds"]),
                "" if one["low"] is None else f"{one['low']:.2f}–{one['high']:.2f} of {one['pairs']}",
                one["verdict"],
                f"{one['tokens_per_pass']:.2f}",
                bench_report.percent(one["accepted"] / one["draft_tokens"]) if right else "",
                "" if one["draft_s_share"] is None else bench_report.percent(one["draft_s_share"]),
                f"{one['different_texts']} of {one['num_texts']}",
            ]
        )
    return Report(
        f"{arguments.model}, {arguments.threads} thread(s), {arguments.tokens} tokens an answer"
        + (f", draft: {arguments.drafter}" if arguments.drafter else ""),
        [
            *("prompts", "method", ">batch", ">off tok/s", ">on tok/s", ">ratio", ">least to most", ">rounds"),
            *(">95 % of pairs", "verdict"),
            *(">tokens a pass", ">right", ">of the time guessing", ">differ"),
        ],
        rows,
        figures,
    )


def prepare(arguments: argparse.Namespace) -> None:
    """What is made once, and not measured: copies in fewer bits, packed weights, and llama.cpp's file."""
    if arguments.gguf is not None and not arguments.gguf.exists():
        with console.progress() as progress:
            package_gguf(arguments.model, arguments.gguf, progress)
    folder = find_model(arguments.model)
    engines = Engines(arguments, folder)
    for method in (engines.off, *engines.methods):
        Engines(arguments, folder).of(method)  # one at a time: weights that are packed now are not mapped yet
        gc.collect()


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("model")
    options.add_argument("--drafter", help="what guesses in draft, and in auto where it is given")
    options.add_argument("--methods", type=bench_report.names, default=["ngram", "auto"])
    options.add_argument("--workloads", type=bench_report.names, default=list(TEXTS))
    options.add_argument("--batch", type=bench_report.whole_numbers, default=[1, 4, 16])
    options.add_argument("--prompts", type=int, default=8, help="of each workload, at least a batch")
    options.add_argument("--waves", type=int, default=1, help="batches of prompts in a pair, one after the other")
    options.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    options.add_argument("--prompt-tokens", type=int, default=1024, help="of a prompt: longer ones are cut")
    options.add_argument("--num-tokens", type=int, default=4, help="guessed at once by what is not auto")
    options.add_argument("--repeats", type=int, default=3, help="rounds")
    options.add_argument("--minutes", type=float, help="after which no round is begun")
    options.add_argument("--kv-mib", type=int, default=1024)
    options.add_argument("--work", type=Path, help="folder in which each round is kept, for a run that goes on")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--llamacpp", type=Path, metavar="PYTHON", help="one that has llama-cpp-python")
    options.add_argument("--gguf", type=Path, help="what llama.cpp runs")
    options.add_argument("--prepare", action="store_true", help="only make what is made once")
    arguments = options.parse_args(argv)
    if arguments.llamacpp is not None and arguments.gguf is None:
        options.error("--llamacpp: with which file? Give --gguf")
    if arguments.prepare:
        prepare(arguments)
        return {}
    return bench_report.run(arguments, measure)


if __name__ == "__main__":
    main()
