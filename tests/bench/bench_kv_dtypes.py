"""What each KV dtype costs in accuracy: perplexity, and KL and top-1 agreement against `--kv-dtype auto`, same weights.

Attention reads K and V only as stored, so that this is what a server with that --kv-dtype answers by.
"""

import argparse
from pathlib import Path

import bench_report
from bench_report import Report

from llmq.evals.evaluation import Subject, evaluate_text, plan_text
from llmq.evals.numerics import Numerics
from llmq.profiles.checkpoint import find_model

KV_DTYPES = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")


def measure(arguments: argparse.Namespace) -> Report:
    folder = find_model(arguments.model)
    text = Path(arguments.text).read_text(encoding="utf-8")

    def subject(kv_dtype: str) -> Subject:
        numerics = Numerics(dtype=arguments.dtype, kv_dtype=kv_dtype, threads=arguments.threads)
        return Subject.open(folder, numerics, max_model_len=arguments.window, max_num_seqs=4)

    baseline = subject("auto")
    auto = baseline.engine.info.fingerprint["kv_dtype"]
    encoded, plan = plan_text(
        baseline.tokenizer, text, arguments.text, window=arguments.window, max_windows=arguments.windows
    )
    figures = {}
    for kv_dtype in arguments.kv_dtypes:
        if kv_dtype == auto:
            continue
        candidate = subject(kv_dtype)
        found = evaluate_text(candidate, encoded, plan, baseline).divergence
        figures[auto] = {"bytes_per_token": _bytes_per_token(baseline), "baseline": found.baseline.to_dict()}
        figures[kv_dtype] = {"bytes_per_token": _bytes_per_token(candidate), **found.to_dict()}
        del candidate  # before the next one's weights are read
    rows = [[f"{auto} (auto)", f"{figures[auto]['bytes_per_token']:,}", _ppl(figures[auto]["baseline"]), "", ""]]
    for kv_dtype, found in figures.items():
        if kv_dtype != auto:
            measures = [_ppl(found["candidate"]), f"{found['mean_kl']:.6f}", f"{found['top1_agreement']:.2%}"]
            rows.append([kv_dtype, f"{found['bytes_per_token']:,}", *measures])
    return Report(
        f"KV dtypes of {arguments.model} on {plan.num_tokens:,} tokens, windows of {arguments.window}, "
        f"dtype {baseline.engine.info.fingerprint['dtype']}",
        ["KV dtype", ">B/token", ">token ppl", ">KL to auto", ">top-1 agreement"],
        rows,
        figures,
    )


def _bytes_per_token(subject: Subject) -> int:
    return sum(group.bytes_per_token for group in subject.engine.scheduler.kv.groups)


def _ppl(perplexity: dict) -> str:
    return f"{perplexity['token_ppl']:.4f}"


def _names(text: str) -> list[str]:
    return text.split(",")


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--text", default=str(bench_report.shared_path("text", "wikitext2-raw.test.txt")))
    options.add_argument("--window", type=int, default=2048)
    options.add_argument("--windows", type=int, default=20)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--kv-dtypes", type=_names, default=list(KV_DTYPES), help="bf16,int8,…")
    options.add_argument("--threads", type=int)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
