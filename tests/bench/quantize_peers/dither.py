"""A copy of a checkpoint off the 4-bit grid it came from, for methods that would land on the same grid.

SmolLM2-135M comes as a Q4_1 file: blocks of 32 weights along the input, each one of 16 levels between the block's least
and largest. Seeded uniform noise of half a step either way is added to each; the 16-bit result is its own reference.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK, LEVELS = 32, 16
# Stored in bf16 a level lies up to a few hundredths of a step off.
_MAX_OFF_GRID = 0.1


def dithered_copy(model: Path, out: Path, seed: int = 0) -> Path:
    """`out`: the model with each linear of its layers dithered; made once. Raises ValueError for other grids."""
    if out.exists():
        return out
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(model, partial)
    generator = torch.Generator().manual_seed(seed)
    state = load_file(model / "model.safetensors")
    for name in sorted(state):
        if name.startswith("model.layers.") and state[name].dim() == 2:
            state[name] = dithered(name, state[name], generator)
    save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
    partial.rename(out)
    return out


def dithered(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    """[out, in] on a Q4_1 grid -> the same plus noise in ±step/2, the step being each block's own."""
    blocks = weight.float().view(-1, BLOCK)
    low, high = blocks.aminmax(dim=1, keepdim=True)
    step = (high - low) / (LEVELS - 1)
    level = (blocks - low) / step.clamp(min=torch.finfo(torch.float32).tiny)
    if float((level - level.round()).abs().max()) > _MAX_OFF_GRID:
        raise ValueError(f"{name} is not on a Q4_1 grid: its dithered copy would not be what the table says")
    noise = torch.rand(blocks.shape, generator=generator) - 0.5
    return (blocks + noise * step).to(weight.dtype).view(weight.shape)
