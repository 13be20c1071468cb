"""FP8 checkpoints in transformers: the very products that their schemes say, with static scales and in blocks too."""

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from llmq.profiles.checkpoint import read_checkpoint
from llmq.quantize.formats.registry import format_of
from llmq.quantize.layer_stream import TensorReader

LARGEST = 448.0  # of e4m3


def rounded(x, scale):
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def rounded_input(weight, _, inputs):
    """A forward pre-hook: the input as the scheme of `weight` rounds it."""
    x, activation = inputs[0], weight.scheme.activation
    if not activation.dynamic:
        return (rounded(x, weight.input_scale.float()),)
    groups = x.unflatten(-1, (-1, activation.group_size or x.shape[-1]))
    return (rounded(groups, groups.abs().amax(-1, keepdim=True) / LARGEST).flatten(-2),)


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [
        ("dynamic", "compressed-tensors"),
        ("static", "compressed-tensors"),
        ("block", "compressed-tensors"),
        ("block", "fp8"),
    ],
)
def test_transformers_computes_what_the_scheme_says(
    tiny_llama, run_quantize, calibration_jsonl, tmp_path, scheme, layout
):
    from transformers import AutoModelForCausalLM

    source = tiny_llama(hidden_size=256, intermediate_size=512, head_dim=64, dtype="bfloat16")
    out, dense = tmp_path / "out", tmp_path / "dense"
    report = run_quantize(source, out, "fp8", calibration_jsonl, fp8_scheme=scheme, format=layout)
    assert report.loaders == ("llmq", "vllm", "transformers")
    checkpoint = read_checkpoint(out)
    read, stored = TensorReader(checkpoint), format_of(checkpoint.quantization, checkpoint.tensors)
    names = list(read_checkpoint(source).tensors)
    weights = {
        name: stored.read(name.removesuffix(".weight"), read)
        for name in names
        if checkpoint.tensors[name].dtype == "F8_E4M3"
    }
    assert len(weights) == 14
    shutil.copytree(source, dense)
    tensors = {name: weights[name].dequantize() if name in weights else read(name).float() for name in names}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    expected, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (dense, out))
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        unrounded = expected(ids).logits
        if layout == "compressed-tensors":  # on a CPU transformers dequantizes the other one, and rounds no input
            for name, weight in weights.items():
                linear = expected.get_submodule(name.removesuffix(".weight"))
                linear.register_forward_pre_hook(partial(rounded_input, weight))
            assert not torch.allclose(expected(ids).logits, unrounded, atol=0.01)
        torch.testing.assert_close(theirs(ids).logits.float(), expected(ids).logits, rtol=0, atol=1e-4)
