"""What each KV dtype costs in accuracy: perplexity, and KL and top-1 agreement against a bf16 KV-cache, same weights.

Attention reads K and V only as stored, so that this is what a server with that --kv-dtype answers by.
"""

import argparse
from pathlib import Path

import bench_report
from bench_report import Report

from llmq.evals.evaluation import Subject, evaluate_text, plan_text
from llmq.evals.numerics import Numerics
from llmq.profiles.checkpoint import find_model

KV_DTYPES = ("int8", "fp8", "int4")


def measure(arguments: argparse.Namespace) -> Report:
    folder = find_model(arguments.model)
    text = Path(arguments.text).read_text(encoding="utf-8")

    def subject(kv_dtype: str) -> Subject:
        numerics = Numerics(dtype=arguments.dtype, kv_dtype=kv_dtype, threads=arguments.threads)
        return Subject.open(folder, numerics, max_model_len=arguments.window, max_num_seqs=4)

    baseline = subject("bf16")
    encoded, plan = plan_text(
        baseline.tokenizer, text, arguments.text, window=arguments.window, max_windows=arguments.windows
    )
    rows, figures = [], {}
    for kv_dtype in ("bf16", *KV_DTYPES):
        candidate = subject(kv_dtype)
        found = evaluate_text(candidate, encoded, plan, baseline).divergence
        bytes_per_token = sum(group.bytes_per_token for group in candidate.engine.scheduler.kv.groups)
        figures[kv_dtype] = {"bytes_per_token": bytes_per_token, **found.to_dict()}
        measures = [f"{found.candidate.token_ppl:.4f}", f"{found.mean_kl:.5f}", f"{found.top1_agreement:.2%}"]
        rows.append([kv_dtype, f"{bytes_per_token:,}", *measures])
    return Report(
        f"KV dtypes on {plan.num_tokens:,} tokens, windows of {arguments.window}, weights in {arguments.dtype}",
        ["KV dtype", ">B/token", ">token ppl", ">KL to bf16", ">top-1 agreement"],
        rows,
        figures,
    )


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--text", default=str(bench_report.shared_path("text", "wikitext2-raw.test.txt")))
    options.add_argument("--window", type=int, default=2048)
    options.add_argument("--windows", type=int, default=20)
    options.add_argument("--dtype", default="bf16")
    options.add_argument("--threads", type=int)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
