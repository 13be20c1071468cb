"""`llmq quantize`, in this process, by its command line."""

import sys

import safetensors.torch
import torch
import transformers
from dense import decompressed_state, save_changed
from job import Job, Meter

import llmq.quantize.pipeline
from llmq.cli.main import main as llmq_command

# What the command would import while it is measured.
IMPORTED = (torch, safetensors.torch, transformers.AutoModelForCausalLM, llmq.quantize.pipeline)


def main() -> None:
    job = Job.from_command_line()
    meter = Meter(job)
    sys.argv = ["llmq", *arguments(job)]
    try:
        llmq_command()
    except SystemExit as ended:
        if ended.code:
            raise
    meter.stop()
    save_changed(job, decompressed_state(job.checkpoint))


def arguments(job: Job) -> list[str]:
    scheme, options = job.scheme, job.options
    made = ["quantize", job.model, f"--{options['method']}", "--no-proof", "-o", str(job.checkpoint)]
    if scheme.group_size:
        made += ["--bits", str(scheme.bits), "--group-size", str(scheme.group_size)]
        made.append("--sym" if scheme.symmetric else "--asym")
    if options.get("is_calibrated", True):
        source = job.calibration
        made += [
            "--calib",
            source["text"],
            "--samples",
            str(source["num_samples"]),
            "--seq-len",
            str(source["seq_len"]),
        ]
    return made


if __name__ == "__main__":
    main()
