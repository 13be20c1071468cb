"""The consumer's proof: every checkpoint that `llmq quantize` writes, run by transformers and by vLLM, token by token.

Each recipe below is run by the installed `llmq quantize` (what it refuses is shown with its words); each consumer
continues 10 prompts greedily for 64 tokens; our engine scores those texts, in float32 for transformers and in the
checkpoint's own dtype for vLLM. Where our engine would have chosen another token, it has a lead: a `near tie` up to the
bound, which rounding in another order may turn, and a real difference above.

gptqmodel dequantizes to fp16, which 4 bits with zero points do not fit into (a scale of 8 bits times q - zero of 4),
and runs AWQ's products in fp16: on SmolLM2-135M that moves a logit by up to 0.02 and 0.09 (`--near-tie-fp16`).

Where inputs or K and V are rounded too (INT8, FP8), a sum in another order puts some numbers on the other side of a
step, and the next layers carry that on: our own engine, token by token in float32 against one forward, leads by up to
0.69 logits on SmolLM2-135M. The bound is wider there (`--near-tie-rounded`).

vLLM: give the Python of an environment that has it (`--vllm-python`); without, its column is left out. `--gptqmodel`
gives transformers the libraries by which it loads the GPTQ and AWQ layouts, in an environment that the first use makes.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import bench_report
from bench_report import Report
from quantize_peers.environments import transformers_python

from llmq.evals.evaluation import Subject
from llmq.evals.numerics import Numerics
from llmq.evals.stepping import RequestStream
from llmq.profiles.checkpoint import find_model, read_checkpoint
from llmq.profiles.units import format_bytes
from llmq.quantize.formats.registry import format_of
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees because",
    "The three branches of government are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the square root of 144?\nA:",
    "In 1969, the first people",
    "The recipe needs two eggs, a cup of flour and",
    "She opened the letter and read:",
)
# Name -> options of `llmq quantize`. Calibration is short: what is proved is the layout, not the quality.
RECIPES = {
    "rtn w4 asym": "--rtn",
    "rtn w4 sym": "--rtn --sym",
    "rtn w4 channel": "--rtn --sym --group-size channel",
    "rtn w8 asym": "--rtn --bits 8",
    "rtn w8 sym": "--rtn --bits 8 --sym",
    "rtn w3": "--rtn --bits 3",
    "gptq w4": "--gptq",
    "awq w4": "--awq",
    "gptq layout w4": "--rtn --sym --format gptq",
    "gptq layout w8": "--rtn --bits 8 --sym --format gptq",
    "gptq layout w3": "--rtn --bits 3 --sym --format gptq",
    "gptq_v2 layout w4": "--rtn --format gptq_v2",
    "gptq_v2 layout w8": "--rtn --bits 8 --format gptq_v2",
    "gptq_v2 layout w3": "--rtn --bits 3 --format gptq_v2",
    "awq layout w4": "--rtn --format awq",
    "gptq, gptq layout": "--gptq --sym --format gptq",
    "gptq, gptq_v2 layout": "--gptq --format gptq_v2",
    "gptq, awq layout": "--gptq --format awq",
    "awq, gptq layout": "--awq --sym --format gptq",
    "awq, gptq_v2 layout": "--awq --format gptq_v2",
    "awq, awq layout": "--awq --format awq",
    "smoothquant": "--smoothquant",
    "fp8 dynamic": "--fp8",
    "fp8 static": "--fp8 --fp8-scheme static",
    "fp8 block": "--fp8 --fp8-scheme block",
    "HF fp8 layout": "--fp8 --fp8-scheme block --format fp8",
    "rtn w4, kv fp8": "--rtn --kv fp8",
    "rtn w4, kv int8": "--rtn --kv int8",
    "fp8, kv fp8": "--fp8 --kv fp8",
    "autoawq": "--awq --backend autoawq",
}
# Layouts that transformers loads by another library.
BY_GPTQMODEL = ("--format gptq", "--format gptq_v2", "--format awq", "--backend autoawq")
CALIBRATION = ("--samples", "8", "--seq-len", "512")
UNCALIBRATED = ("--rtn", "--fp8")


@dataclass(frozen=True)
class Comparison:
    """A consumer's tokens held against our engine. `leads`: of each prompt, at which of its tokens our engine would
    have chosen another, and by how many logits."""

    leads: list[dict[int, float]]
    bound: float

    @property
    def real_differences(self) -> list[int]:
        """The prompts where our lead is larger than what rounding explains."""
        return [number for number, leads in enumerate(self.leads) if max(leads.values(), default=0.0) > self.bound]

    def __str__(self) -> str:
        equal = sum(not leads for leads in self.leads)
        near = len(self.leads) - equal - len(self.real_differences)
        words = [f"{equal} equal"] if equal else []
        if near:
            words.append(f"{near} near ties")
        if self.real_differences:
            words.append(f"{len(self.real_differences)} DIFFER")
        largest = max((max(leads.values(), default=0.0) for leads in self.leads), default=0.0)
        return ", ".join(words) + (f" (lead up to {largest:.3f})" if largest else "")


def quantize(name: str, model: str, folder: Path) -> str | None:
    """Make the checkpoint unless it is there; None, or why it was refused."""
    if folder.exists():
        return None
    options = shlex.split(RECIPES[name])
    calibrated = () if options[0] in UNCALIBRATED and "--kv" not in options and "static" not in options else CALIBRATION
    command = [sys.executable, "-m", "llmq", "quantize", model, *options, *calibrated, "--no-proof", "-o", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else _first_words(done.stderr)


def compare(
    folder: Path, prompts: list[list[int]], tokens: list[list[int]], bound: float, dtype: str, threads: int
) -> Comparison:
    """Score what a consumer generated with our engine, each text in one forward.

    Up to the first difference this is what our own greedy generation would have been held against; after it, it says of
    the consumer's own text whether ours agrees with each further step.
    """
    numerics = Numerics(dtype=dtype, device="cpu", threads=threads)
    engine = Subject.open(folder, numerics, max_model_len=len(prompts[0]) + len(tokens[0]) + 1).engine
    requests = [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[*prompt, *generated],
            sampling_params=SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=len(prompt)),
        )
        for number, (prompt, generated) in enumerate(zip(prompts, tokens, strict=True))
    ]
    leads: list[dict[int, float]] = [{} for _ in prompts]
    for output in RequestStream(engine, requests):
        for position, entry in enumerate(output.prompt_logprobs or []):
            if entry.rank > 1:
                leads[int(output.request_id)][position] = entry.top[0][1] - entry.logprob
    return Comparison(leads, bound)


def theirs(
    python: str, script: str, folders: dict[str, Path], prompts: list[list[int]], arguments: argparse.Namespace
) -> dict[str, list[list[int]] | str]:
    """A consumer's greedy tokens for each checkpoint, or why it does not load or run it.

    One process for all of them; one that dies is followed by another for those that are left. Answers are kept beside
    the checkpoints, and asked for again when a checkpoint or the question is another one.
    """
    kept = {name: folder.parent / f"{folder.name}.{script}.json" for name, folder in folders.items()}
    questions = {name: [_digest(folder), prompts, arguments.tokens] for name, folder in folders.items()}
    answers: dict[str, list[list[int]] | str] = {}
    for name, path in kept.items():
        if path.exists() and (found := json.loads(path.read_text()))["question"] == questions[name]:
            answers[name] = found["answer"]
    while left := {name: str(folder) for name, folder in folders.items() if name not in answers}:
        job = {"folders": left, "prompts": prompts, "num_tokens": arguments.tokens, "threads": arguments.threads}
        started = next(iter(left))
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "job.json").write_text(json.dumps(job))
            for line in _run([python, str(Path(__file__).parent / script), f"{scratch}/job.json"], arguments):
                started = line.get("started", started)
                if "name" in line:
                    answer = answers[line["name"]] = line.get("tokens") or line["error"]
                    content = {"question": questions[line["name"]], "answer": answer}
                    kept[line["name"]].write_text(json.dumps(content))
                    print(f"{script}: {line['name']} {line.get('error', 'done')[:300]}", file=sys.stderr, flush=True)
        answers.setdefault(started, "its process died")
    return answers


def _run(command: list[str], arguments: argparse.Namespace) -> Iterator[dict]:
    """The JSON objects that a consumer prints, one a line, among whatever else it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    with (
        open(arguments.log, "a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        for line in process.stdout:
            log.write(line)
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


def _digest(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _first_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("llmq:", "Error", "error"))]
    return (named or lines or ["no word"])[0].removeprefix("llmq: ")[:160]


def encode(model: Path) -> list[list[int]]:
    from llmq.runtime.frontend.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(model)
    encoded = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    shortest = min(map(len, encoded))  # of one length: a batch without padding
    return [ids[:shortest] for ids in encoded]


def measure(arguments: argparse.Namespace) -> Report:
    model = find_model(arguments.model)
    prompts = encode(model)
    work = Path(arguments.folder or tempfile.mkdtemp(prefix="llmq-consumers-"))
    work.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict] = {}
    folders: dict[str, Path] = {}
    for name in arguments.recipes or RECIPES:
        folder = work / name.replace(",", "").replace(" ", "-")
        if refused := quantize(name, str(model), folder):
            figures[name] = {"refused": refused}
        else:
            folders[name] = folder
            figures[name] = {"bytes": read_checkpoint(folder).total_bytes}
        print(f"made: {name} {figures[name]}", file=sys.stderr, flush=True)
    for consumer in consumers(arguments):
        for python in dict.fromkeys((consumer.python, consumer.python_for_layouts)):
            asked = {name: folder for name, folder in folders.items() if consumer.python_of(name) == python}
            for name, answer in theirs(python, consumer.script, asked, prompts, arguments).items():
                figures[name][consumer.name] = answer
    for name, folder in folders.items():
        for consumer in consumers(arguments):
            answer = figures[name][consumer.name]
            figures[name][consumer.name] = _judge(name, folder, prompts, consumer, answer, arguments)
            print(f"{name}, {consumer.name}: {figures[name][consumer.name]['verdict']}", file=sys.stderr, flush=True)
    return Report(
        f"{model.name}: {len(prompts)} prompts, {arguments.tokens} greedy tokens each, held against our engine's",
        ["checkpoint", ">weights", *(consumer.title for consumer in consumers(arguments))],
        [_row(name, found, consumers(arguments)) for name, found in figures.items()],
        figures,
        [
            f"{consumer.title}: a near tie is a lead of ours of at most {consumer.near_tie} logits, in GPTQ's and "
            f"AWQ's layouts {consumer.near_tie_for_layouts}, where inputs or K and V are rounded "
            f"{arguments.near_tie_rounded}, computed in {consumer.dtype}."
            for consumer in consumers(arguments)
        ],
    )


@dataclass(frozen=True)
class Consumer:
    name: str
    title: str
    python: str
    python_for_layouts: str  # of an environment that has what it loads GPTQ's and AWQ's layouts by
    script: str
    dtype: str  # of our engine, to be held against it
    near_tie: float
    near_tie_for_layouts: float

    def python_of(self, recipe: str) -> str:
        return self.python_for_layouts if _is_layout(recipe) else self.python

    def near_tie_of(self, recipe: str) -> float:
        return self.near_tie_for_layouts if _is_layout(recipe) else self.near_tie


def _is_layout(recipe: str) -> bool:
    return RECIPES[recipe].endswith(BY_GPTQMODEL)


def consumers(arguments: argparse.Namespace) -> list[Consumer]:
    for_layouts = str(transformers_python()) if arguments.gptqmodel else sys.executable
    transformers = Consumer(
        name="transformers",
        title="transformers",
        python=sys.executable,
        python_for_layouts=for_layouts,
        script="consumer_transformers.py",
        dtype="fp32",
        near_tie=arguments.near_tie_fp32,
        near_tie_for_layouts=arguments.near_tie_fp16,
    )
    if arguments.vllm_python is None:
        return [transformers]
    # vLLM's numbers for the original are in the checkpoint's own dtype, and so are ours.
    vllm = Consumer(
        name="vllm",
        title="vLLM on a CPU",
        python=arguments.vllm_python,
        python_for_layouts=arguments.vllm_python,
        script="consumer_vllm.py",
        dtype="auto",
        near_tie=arguments.near_tie_16bit,
        near_tie_for_layouts=arguments.near_tie_16bit,
    )
    return [transformers, vllm]


def rounds_activations(folder: Path) -> bool:
    """Whether a checkpoint rounds the input of any linear, or K and V."""
    checkpoint = read_checkpoint(folder)
    layout = format_of(checkpoint.quantization, checkpoint.tensors)
    if layout.kv_cache_scheme is not None:
        return True
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors if ".layers." in name}
    return any(scheme.activation is not None for name in modules if (scheme := layout.scheme_for(name)) is not None)


def _judge(
    name: str,
    folder: Path,
    prompts: list[list[int]],
    consumer: Consumer,
    answer: list[list[int]] | str,
    arguments: argparse.Namespace,
) -> dict:
    if isinstance(answer, str):
        return {"loads": False, "error": answer, "verdict": f"does not run: {' '.join(answer.split())[:160]}"}
    bound = arguments.near_tie_rounded if rounds_activations(folder) else consumer.near_tie_of(name)
    comparison = compare(folder, prompts, answer, bound, consumer.dtype, arguments.threads)
    return {"loads": True, "verdict": str(comparison), **asdict(comparison)}


def _row(name: str, found: dict, asked: list[Consumer]) -> list[str]:
    if "refused" in found:
        return [name, "", f"not written: {found['refused']}", *("" for _ in asked[1:])]
    return [name, format_bytes(found["bytes"]), *(found[consumer.name]["verdict"] for consumer in asked)]


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--folder", help="where checkpoints and answers are kept; those that are there are taken")
    options.add_argument("--recipes", nargs="+", choices=list(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    options.add_argument("--vllm-python", help="the interpreter of an environment that has vLLM for CPUs")
    options.add_argument("--gptqmodel", action="store_true", help="make and use an environment with gptqmodel")
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--near-tie-fp32", type=float, default=0.01)
    options.add_argument("--near-tie-fp16", type=float, default=0.1, help="of transformers by gptqmodel")
    options.add_argument("--near-tie-16bit", type=float, default=0.5)
    options.add_argument("--near-tie-rounded", type=float, default=1.0)
    options.add_argument("--log", default=os.devnull, help="a file for what the consumers print")
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
