"""What `llmq quantize` says of its result on held-out text: perplexity, KL and top-1 against the original."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.cli import console
from llmq.profiles.errors import FailedError, InputError

if TYPE_CHECKING:
    from llmq.quantize.report import QuantizationReport

WINDOW, NUM_WINDOWS = 2048, 2
TEXT = "Python's language reference (held-out half)"


def prove(report: "QuantizationReport", out: Path, device: str) -> "QuantizationReport":
    """The report with the proof in it, in OUT too. What the runtime does not run is said, and stays without one."""
    from llmq.quantize.report_files import write_report

    try:
        # Scales moved and nothing rounded: what 16 bit of the original loses would hide that this changes nothing.
        dtype = "fp32" if report.bits_per_quantized_weight is None else "auto"
        proof = measure(Path(report.source), out, device, dtype)
    except (InputError, FailedError) as error:
        console.warn(f"no proof against the original: {error}")
        return report
    report = replace(report, proof=proof)
    write_report(out, report)
    return report


def measure(original: Path, quantized: Path, device: str, dtype: str = "auto") -> dict[str, Any]:
    """Both through llmq's runtime, as `llmq eval --baseline` does. dtype: of both; "auto": each computes in its own."""
    from llmq.cli.eval_text import run_text
    from llmq.evals.evaluation import resolve_window
    from llmq.evals.numerics import Numerics
    from llmq.quantize.builtin_text import builtin_text

    window = resolve_window(original, None)
    numerics = Numerics(dtype=dtype, device="cuda" if device.startswith("cuda") else device)
    _, evaluation = run_text(
        quantized, builtin_text("heldout"), TEXT, original, numerics, (min(WINDOW, window), None, NUM_WINDOWS)
    )
    divergence = evaluation.divergence
    return {"source": TEXT, **divergence.to_dict()}


def print_proof(report: "QuantizationReport") -> None:
    if report.proof is None:
        return
    proof = report.proof
    before, after = proof["baseline"]["token_ppl"], proof["candidate"]["token_ppl"]
    console.print_table(
        f"against the original, on {proof['num_positions']:,} tokens of {proof['source']}",
        ["", ""],
        [
            ["token perplexity", f"{before:.4f} → {after:.4f}, {after / before - 1:+.2%}"],
            ["KL divergence", f"{proof['mean_kl']:.5f} nats a token, 99 % below {proof['p99_kl']:.3f}"],
            ["same next token", f"{proof['top1_agreement']:.2%}, greedy"],
        ],
    )
