"""auto-round: rounding and clipping tuned by signed gradient descent, block by block (SignRound, arXiv:2309.05516)."""

import torch
from auto_round import AutoRound
from dense import save_changed
from job import Job, Meter
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    job = Job.from_command_line()
    meter = Meter(job)
    scheme = job.scheme
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    tuner = AutoRound(
        model,
        AutoTokenizer.from_pretrained(job.model),
        scheme="W4A16",
        bits=scheme.bits,
        group_size=scheme.group_size,
        sym=scheme.symmetric,
        dataset=[{"input_ids": torch.tensor([ids])} for ids in job.samples],
        nsamples=len(job.samples),
        seqlen=max(map(len, job.samples)),
        device_map="cpu",
        amp=job.dtype != "float32",  # else its blocks multiply in bf16
        enable_torch_compile=False,
        **job.options,
    )
    tuner.quantize_and_save(str(job.checkpoint), format="fake")
    meter.stop()
    folder = next(path.parent for path in job.checkpoint.rglob("config.json"))
    save_changed(job, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())


if __name__ == "__main__":
    main()
