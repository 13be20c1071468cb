"""What an int8 head and int8 activations cost in accuracy: perplexity, and KL and top-1 agreement against the same
weights with a 16-bit head and exact activations. By torch's kernels too, whose other roundings are the scale's zero.

    llmq quantize smollm2-135m --rtn --bits 4 --group-size 64 -o smol-4bit
    python tests/bench/bench_native_numerics.py smol-4bit --windows 4

Whose bf16 is nearer to float32:

    python tests/bench/bench_native_numerics.py smollm2-135m --against fp32 --ways exact,torch --windows 5
"""

import argparse
from pathlib import Path

import bench_report
from bench_report import Report

from llmq.evals.evaluation import Subject, evaluate_text, plan_text
from llmq.evals.numerics import Numerics
from llmq.profiles.checkpoint import find_model

# name -> options of an engine
REFERENCES = {
    "exact": {"kernels": "native", "head": "16bit"},
    "torch": {"kernels": "torch"},
    "fp32": {"kernels": "torch", "dtype": "fp32"},
}
WAYS = {
    "exact": REFERENCES["exact"],
    "torch": REFERENCES["torch"],
    "head int8": {"kernels": "native", "head": "int8"},
    "activations int8": {"kernels": "native", "head": "16bit", "activations": "int8"},
    "both int8": {"kernels": "native", "head": "int8", "activations": "int8"},
    "both and KV int8": {"kernels": "native", "head": "int8", "activations": "int8", "kv_dtype": "int8"},
}


def measure(arguments: argparse.Namespace) -> Report:
    folder = find_model(arguments.model)
    text = Path(arguments.text).read_text(encoding="utf-8")

    def subject(**options: str) -> Subject:
        numerics = Numerics(**{"dtype": "bf16", "device": "cpu", "threads": arguments.threads, **options})
        return Subject.open(folder, numerics, max_model_len=arguments.window, max_num_seqs=4)

    baseline = subject(**REFERENCES[arguments.against])
    encoded, plan = plan_text(
        baseline.tokenizer, text, arguments.text, window=arguments.window, max_windows=arguments.windows
    )
    figures, rows = {}, []
    for way in arguments.ways:
        candidate = subject(**WAYS[way])
        found = evaluate_text(candidate, encoded, plan, baseline).divergence
        figures[way] = found.to_dict()
        if not rows:
            rows.append([f"{arguments.against}, the reference", f"{found.baseline.to_dict()['token_ppl']:.4f}", "", ""])
        measures = [f"{figures[way]['mean_kl']:.6f}", f"{figures[way]['top1_agreement']:.2%}"]
        rows.append([way, f"{figures[way]['candidate']['token_ppl']:.4f}", *measures])
        del candidate  # before the next one's weights are read
    return Report(
        f"{arguments.model} on {plan.num_tokens:,} tokens, windows of {arguments.window}",
        ["", ">token ppl", ">mean KL", ">top-1 agreement"],
        rows,
        figures,
    )


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("model", nargs="?", default="smollm2-135m")
    options.add_argument("--text", default=str(bench_report.shared_path("text", "wikitext2-raw.test.txt")))
    options.add_argument("--window", type=int, default=2048)
    options.add_argument("--windows", type=int, default=4)
    options.add_argument("--against", choices=REFERENCES, default="exact")
    options.add_argument("--ways", type=bench_report.names, default=list(WAYS)[1:])
    options.add_argument("--threads", type=int)
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
