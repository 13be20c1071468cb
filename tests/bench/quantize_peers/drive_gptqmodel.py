"""GPTQModel with its defaults, but for the scheme asked for. Runs in an environment of its own."""

import os

# On one or two cores it would make a pool of one worker and then fail to share it out.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from dense import save_changed
from gptqmodel import BACKEND, GPTQConfig, GPTQModel
from job import Job, Meter


def main() -> None:
    job = Job.from_command_line()
    meter = Meter(job)
    scheme = job.scheme
    config = GPTQConfig(bits=scheme.bits, group_size=scheme.group_size, sym=scheme.symmetric, device="cpu")
    model = GPTQModel.load(job.model, config)
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job.samples]
    model.quantize(samples, batch_size=1)
    model.save(str(job.checkpoint))
    meter.stop()
    del model
    save_changed(job, dequantized_state(job))


def dequantized_state(job: Job) -> dict:
    """What the saved folder holds, each packed linear dequantized by GPTQModel's own code."""
    torch.compiler.set_stance("force_eager")  # compiling it takes longer than running it once
    model = GPTQModel.load(str(job.checkpoint), backend=BACKEND.TORCH, device="cpu").model
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            state[f"{name}.weight"] = module.dequantize_weight().T
    return state


if __name__ == "__main__":
    main()
