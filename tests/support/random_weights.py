"""Random QuantizedWeights of every kind, and checkpoints of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmq.profiles.checkpoint import read_checkpoint
from llmq.quantize.formats.packing import pack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.registry import writer_for
from llmq.quantize.formats.scheme import WeightScheme


def make(kind, bits, strategy, out, in_, seed, *, zero=None, outer=0, block_rows=None, group_size=16, order=False):
    """A random weight. zero: None, "int" or "float"; outer: how many groups share an outer scale."""
    generator = torch.Generator().manual_seed(seed)
    is_packed = not (kind == "float" and bits == 8)
    scheme = WeightScheme(
        kind,
        bits,
        strategy,
        group_size if strategy in ("group", "block") else None,
        zero is None,
        layout="pack-quantized" if is_packed else "float-quantized",
        has_offset=zero == "float",
        block_rows=block_rows,
        has_column_groups=order,
    )
    u = torch.randint(0, 1 << bits, (out, in_), generator=generator)
    scale_shape = scheme.scale_shape((out, in_))
    outer_shape = (out, scale_shape[1] // outer) if outer else None
    half = 1 << (bits - 1)
    return QuantizedWeight(
        scheme,
        (out, in_),
        pack_unsigned(u, bits) if is_packed else torch.randn(out, in_, generator=generator).to(torch.float8_e4m3fn),
        torch.randint(0, 64, scale_shape, generator=generator).to(torch.uint8)
        if outer
        else torch.rand(scale_shape, generator=generator),
        torch.randint(-half, half, scale_shape, generator=generator, dtype=torch.int8) if zero == "int" else None,
        offset=torch.randint(0, 64, scale_shape, generator=generator).to(torch.uint8) if zero == "float" else None,
        outer_scale=torch.rand(outer_shape, generator=generator).half() if outer else None,
        outer_offset=-torch.rand(outer_shape, generator=generator).half() if outer and zero == "float" else None,
        column_order=torch.randperm(in_, generator=generator) if order else None,
    )


KINDS = st.sampled_from(
    [
        *(("int", bits, "group", {"zero": zero}) for bits in (2, 3, 4, 5, 6, 8) for zero in (None, "int")),
        ("int", 4, "channel", {"zero": "int"}),
        ("int", 4, "tensor", {}),
        ("int", 4, "group", {"zero": "float"}),
        ("int", 4, "group", {"zero": "float", "outer": 2}),
        ("int", 6, "group", {"outer": 4}),
        ("float", 4, "group", {"outer": 2}),
        ("float", 8, "channel", {}),
        ("float", 8, "tensor", {}),
        ("float", 8, "block", {"block_rows": 8}),
    ]
)


def quantize_folder(
    source: Path, target: Path, format_name: str, make_weight: Callable[[int, int, int], QuantizedWeight]
) -> Path:
    """Copy the model folder `source`, each linear of its layers as `make_weight(out, in, seed)` in a format."""
    checkpoint, writer = read_checkpoint(source), writer_for(format_name)
    tensors, schemes, ignored = {}, {}, ["lm_head"]
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or not module.startswith("model.layers."):
            continue
        if module.endswith(("mlp.gate", "moe.gate")):
            ignored.append(module)
            continue
        weight = make_weight(*tensor.shape, seed)
        # About as large as what it replaces.
        weight = replace(weight, scale=(weight.scale.float() * 0.2 / weight.dequantize().std()).to(weight.scale.dtype))
        del tensors[name]
        tensors |= writer.tensors(module, weight)
        schemes[module] = weight.scheme
    target.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    config = {**checkpoint.config, "quantization_config": writer.config(schemes, ignored)}
    (target / "config.json").write_text(json.dumps(config))
    return target
