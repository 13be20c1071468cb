"""A quantized checkpoint -> the numbers its linears multiply by, in bf16. For drivers: torch and transformers only."""

from pathlib import Path

import torch
from job import Job
from safetensors.torch import save_file
from torch import Tensor, nn


def save_changed(job: Job, state: dict[str, Tensor]) -> None:
    """Write the floating-point tensors of `state` that differ from the model's, rounded to bf16."""
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16).state_dict()
    changed = {}
    for name, tensor in original.items():
        if name not in state:
            raise KeyError(f"{name} of {job.model} is not in the quantized model")
        new = state[name].detach().to("cpu", torch.bfloat16)
        if not torch.equal(new, tensor):
            changed[name] = new.contiguous().clone()
    save_file(changed, job.dense)


def decompressed_state(checkpoint: Path) -> dict[str, Tensor]:
    """The state of a compressed-tensors folder, decompressed by compressed-tensors itself."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    return model.state_dict()
