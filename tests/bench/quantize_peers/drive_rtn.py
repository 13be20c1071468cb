"""Round to nearest by the textbook formula: no calibration, one scale (and zero point) a group or a row."""

from pathlib import Path

import torch
from dense import save_changed
from job import Job, Meter, Scheme
from safetensors.torch import load_file
from torch import Tensor


def main() -> None:
    job = Job.from_command_line()
    meter = Meter(job)
    state = load_file(Path(job.model) / "model.safetensors")
    for name, tensor in state.items():
        if name.startswith("model.layers.") and tensor.dim() == 2:
            state[name] = rounded(tensor.float(), job.scheme).to(tensor.dtype)
    meter.stop()
    save_changed(job, {"lm_head.weight": state["model.embed_tokens.weight"], **state})


def rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    """[out, in] float32 -> the same, on the grid of `scheme`; the scale as bf16 stores it."""
    groups = weight.view(weight.shape[0], -1, scheme.group_size or weight.shape[1])
    if scheme.kind == "float":
        scale = stored(groups.abs().amax(-1, keepdim=True) / 448.0)
        return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).view(weight.shape)
    half = 1 << (scheme.bits - 1)
    if scheme.symmetric:
        scale, zero = stored(groups.abs().amax(-1, keepdim=True) / (half - 0.5)), 0.0
    else:
        low, high = groups.aminmax(dim=-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = stored((high - low) / (2 * half - 1))
        zero = (-half - low / scale).round()
    return (((groups / scale + zero).round().clamp(-half, half - 1) - zero) * scale).view(weight.shape)


def stored(scale: Tensor) -> Tensor:
    return scale.to(torch.bfloat16).float().clamp(min=1e-30)


if __name__ == "__main__":
    main()
