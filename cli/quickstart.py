"""`llmq quickstart`: the whole loop on a small real model, with what each number means."""

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.cli import console
from llmq.cli.narrator import Narrator
from llmq.profiles.units import format_bytes

MODEL = "smollm2-135m"
# Held-out text for the comparison: enough for a perplexity to within a few per cent, 40 s for both models on 2 cores.
WINDOW, NUM_WINDOWS = 2048, 4
CALIBRATION_SAMPLES, CALIBRATION_TOKENS = 32, 256
# What the budget is shown for: small enough that the weights matter, as 80 GB are for a 70B model.
DEVICE_BYTES = 512 * 2**20
PROMPT = "What is the capital of France?"
MAX_ANSWER_TOKENS = 48

app = typer.Typer(add_completion=False)

Facts = dict[str, Any]


@app.command()
def quickstart(
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.  [default: all cores]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Budget, quantize, prove and serve SmolLM2-135M on this machine, in minutes and without a GPU.

    What it makes is kept in the cache and used again by the next run.
    """
    from llmq.profiles.cache import cache_dir, locked
    from llmq.profiles.checkpoint import find_model

    started_s = time.perf_counter()
    narrator = Narrator(num_steps=5, is_silent=as_json)
    narrator.text(
        f"llmq quickstart: the loop budget → quantize → prove → serve, on {MODEL} (SmolLM2-135M-Instruct).\n"
        f"Everything is kept in {cache_dir()}; a second run reuses it."
    )
    with console.progress() as progress:
        original = find_model(MODEL, progress=progress)
    folder = cache_dir() / "quickstart"
    facts: Facts = {"model": str(original), "budget": show_budget(original, narrator)}
    with locked(folder / "run"):
        quantized, facts["quantize"] = make_quantized(original, folder / f"{MODEL}-gptq", narrator)
        facts["proof"] = prove(original, quantized, folder / "proof.json", threads, narrator)
    facts["chat"] = chat(quantized, threads, narrator)
    facts["duration_s"] = round(time.perf_counter() - started_s, 1)
    show_next(original, quantized, facts, narrator)
    if as_json:
        console.print_json(facts)


def show_budget(original: Path, narrator: Narrator) -> Facts:
    """What one token costs, and how many fit beside the weights, before and after 4 bits."""
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.budget import Budget, whole_memory
    from llmq.profiles.checkpoint import read_config
    from llmq.profiles.kv_spec import KVCacheLayout
    from llmq.profiles.weight_size import weight_size
    from llmq.runtime.config import EngineConfig

    architecture = ModelArchitecture.from_config(read_config(original))
    layout = KVCacheLayout.of(architecture, "bf16")
    budgets = {}
    for name, scheme in (("bf16", None), ("4-bit", "w4g64")):
        weights = weight_size(original, scheme)
        budgets[name] = Budget(
            architecture, layout, 1, WINDOW, weights, EngineConfig(model="").max_num_batched_tokens,
            whole_memory("device", DEVICE_BYTES, weights.num_bytes),
        )  # fmt: skip
    narrator.step("budget: what fits?")
    narrator.table(
        [f"on a device of {format_bytes(DEVICE_BYTES)}", *(f">{name} weights" for name in budgets)],
        [
            ["weights", *(format_bytes(b.weights.num_bytes) for b in budgets.values())],
            ["KV-cache of one token", *(f"{layout.bytes_per_token:,} B" for _ in budgets)],
            [f"KV-cache of {WINDOW:,} tokens", *(format_bytes(b.sequence_bytes) for b in budgets.values())],
            [f"sequences of {WINDOW:,} tokens that fit", *(str(b.num_sequences) for b in budgets.values())],
        ],
    )
    narrator.text(
        "Weights are a fixed cost; every token of every user costs KV-cache on top: 2 (K and V) × "
        f"{architecture.num_layers} layers × {architecture.num_kv_heads} KV heads × {architecture.head_dim} × 2 B.\n"
        "Each generated token reads all of it once, so fewer bytes are also faster. The same for any model:\n"
        "  llmq kv-budget MODEL --ctx 256k --gpu h100"
    )
    return {
        "device_bytes": DEVICE_BYTES,
        "kv_bytes_per_token": layout.bytes_per_token,
        "sequence_tokens": WINDOW,
        "sequences": {name: b.num_sequences for name, b in budgets.items()},
        "weight_bytes": {name: b.weights.num_bytes for name, b in budgets.items()},
    }


def make_quantized(original: Path, out: Path, narrator: Narrator) -> tuple[Path, Facts]:
    """GPTQ to 4 bits, calibrated on the calibration half of the built-in text, or what an earlier run made of it."""
    from llmq.quantize.report import REPORT_FILE

    narrator.step("quantize: GPTQ, 4-bit weights")
    is_reused = _is_made_from(out / REPORT_FILE, original)
    if not is_reused:
        shutil.rmtree(out, ignore_errors=True)  # of another original
        _quantize(original, out)
    report = json.loads((out / REPORT_FILE).read_text(encoding="utf-8"))
    sizes = " → ".join(format_bytes(report[name]) for name in ("bytes_before", "bytes_after"))
    errors = [(entry["output_error"], entry["rtn_output_error"]) for entry in report["linears"]]
    ours, rounding = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    narrator.text(
        f"{'Reused from an earlier run' if is_reused else 'Made'}: {out}\n"
        f"{sizes} in {console.format_duration(report['duration_s'])}. A weight takes "
        f"{report['bits_per_quantized_weight']:.2f} bits: 4, and its share of the scale and\n"
        f"zero point of {report['group_size']['value']}. The embedding, a fifth of this small model, stays in 16 bit.\n"
        "GPTQ rounds column after column, and those to come take up the error, as the inputs call for: that of the\n"
        f"linears' output is {ours:.1%} of its energy, against {rounding:.1%} by rounding alone. With other methods:\n"
        "  llmq quantize MODEL --awq -o OUT      (or --smoothquant, --fp8)"
    )
    kept = ("method", "scheme", "bytes_before", "bytes_after", "bits_per_quantized_weight", "duration_s", "calibration")
    facts = {name: report[name] for name in kept}
    return out, facts | {"path": str(out), "reused": is_reused, "output_error": ours, "rtn_output_error": rounding}


def _is_made_from(report_file: Path, original: Path) -> bool:
    try:
        return json.loads(report_file.read_text(encoding="utf-8"))["source"] == str(original)
    except (OSError, ValueError, KeyError):
        return False


def _quantize(original: Path, out: Path) -> None:
    """What `llmq quantize ORIGINAL --gptq --samples 32 --seq-len 256 -o OUT` does."""
    from llmq.profiles.checkpoint import read_checkpoint
    from llmq.quantize.calibration import BUILTIN, load_calibration, load_tokenizer
    from llmq.quantize.pipeline import quantize_model
    from llmq.quantize.preflight import preflight
    from llmq.quantize.recipe import Recipe

    plan = preflight(read_checkpoint(original), Recipe.of("gptq"), out)
    calibration = load_calibration(
        BUILTIN, load_tokenizer(original), num_samples=CALIBRATION_SAMPLES, seq_len=CALIBRATION_TOKENS
    )
    console.status(f"calibrating on {calibration.num_tokens:,} tokens of {calibration.provenance.source}")
    with console.progress() as progress:
        quantize_model(plan, calibration, restart=True, progress=progress)


def prove(original: Path, quantized: Path, saved: Path, threads: int | None, narrator: Narrator) -> Facts:
    """Perplexity, KL and top-1 of the quantized model against the original, on the held-out half of the text."""
    from llmq.cli.eval_text import BUILTIN, run_text
    from llmq.evals.numerics import Numerics
    from llmq.evals.result import checkpoint_sha256, new_record, plain_json, save_record
    from llmq.quantize.builtin_text import builtin_text

    narrator.step("prove: is it still the same model?")
    identity = {"original": checkpoint_sha256(original), "quantized": checkpoint_sha256(quantized)}
    record = _read_proof(saved, identity)
    is_reused = record is not None
    if record is None:
        started_s = time.perf_counter()
        text = builtin_text("heldout")
        _, evaluation = run_text(
            quantized, text, BUILTIN, original, Numerics(threads=threads), (WINDOW, None, NUM_WINDOWS)
        )
        record = new_record() | {"identity": identity, "text": evaluation.to_dict()}
        record["duration_s"] = round(time.perf_counter() - started_s, 1)
        save_record(record, saved)
        record = plain_json(record)
    _show_proof(record, original, quantized, is_reused, narrator)
    return record | {"reused": is_reused, "path": str(saved)}


def _read_proof(saved: Path, identity: Facts) -> Facts | None:
    """An earlier proof of these very two checkpoints on this amount of text."""
    try:
        record = json.loads(saved.read_text(encoding="utf-8"))
        measured = record["text"]["perplexity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = record.get("identity") == identity and (measured["window"], measured["num_windows"]) == (WINDOW, NUM_WINDOWS)
    return record if same else None


def _show_proof(record: Facts, original: Path, quantized: Path, is_reused: bool, narrator: Narrator) -> None:
    divergence = record["text"]["divergence"]
    before, after = divergence["baseline"], divergence["candidate"]
    sizes = [_weight_file_bytes(folder) for folder in (original, quantized)]
    narrator.table(
        ["", ">bf16", ">4-bit GPTQ", ">change"],
        [
            ["weight files", *map(format_bytes, sizes), f"{sizes[1] / sizes[0]:.0%} of it"],
            [
                "token perplexity",
                f"{before['token_ppl']:.3f}",
                f"{after['token_ppl']:.3f}",
                f"{after['token_ppl'] / before['token_ppl'] - 1:+.1%}",
            ],
            ["mean KL divergence", "", f"{divergence['mean_kl']:.4f}", "nats a token"],
            ["same next token", "", f"{divergence['top1_agreement']:.1%}", "greedy"],
        ],
    )
    again = f" (measured by an earlier run: {record['date']})" if is_reused else ""
    narrator.text(
        f"On {before['num_scored']:,} tokens that no calibration saw{again}.\n"
        "Perplexity is how many next tokens the model hesitates between, on average: lower is better.\n"
        "KL divergence is how far the two models' predictions lie apart: it shows damage that a score hides.\n"
        "A 135M model has little to spare at 4 bits; larger ones lose less. For your own text or questions:\n"
        "  llmq eval MODEL --baseline ORIGINAL --ppl my.txt      llmq eval MODEL --data my.jsonl"
    )


def _weight_file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def chat(quantized: Path, threads: int | None, narrator: Narrator) -> Facts:
    """One streamed answer over HTTP from a server that runs for it alone."""
    from llmq.cli.local_server import StreamedChat, serving

    narrator.step("serve: one chat over HTTP")
    options = [] if threads is None else ["--threads", str(threads)]
    with serving(quantized, "--max-model-len", str(WINDOW), *options) as url:
        narrator.text(f"llmq serve is up at {url}/v1 (OpenAI's API). Asking: {PROMPT}\n")
        messages = [{"role": "user", "content": PROMPT}]
        body = {"model": quantized.name, "messages": messages, "max_tokens": MAX_ANSWER_TOKENS, "temperature": 0}
        answer = StreamedChat(url, body)
        pieces = []
        narrator.piece("  ")
        for piece in answer:
            narrator.piece(piece)
            pieces.append(piece)
    timing = answer.timing
    narrator.text(
        f"\n\n{timing.num_tokens} tokens; the first after {timing.ttft_s:.2f} s (TTFT: reading the prompt), then "
        f"{timing.tokens_per_s:.1f} tokens/s (decoding). The server has been stopped."
    )
    return {
        "prompt": PROMPT,
        "answer": "".join(pieces),
        "num_tokens": timing.num_tokens,
        "ttft_s": round(timing.ttft_s, 3),
        "tokens_per_s": round(timing.tokens_per_s, 2),
    }


def show_next(original: Path, quantized: Path, facts: Facts, narrator: Narrator) -> None:
    narrator.step(f"next ({console.format_duration(facts['duration_s'])} so far)")
    narrator.text(
        f"  llmq serve {quantized}\n"
        '  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\\n'
        f'    -d \'{{"model": "{quantized.name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n'
        f"  llmq inspect {quantized}\n"
        f"  llmq quantize {MODEL} --awq -o smollm2-awq      # or --smoothquant, --fp8\n"
        f"  llmq eval smollm2-awq --baseline {MODEL}"
    )
