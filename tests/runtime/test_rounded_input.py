"""Rounded inputs against compressed-tensors' own emulation of them."""

import pytest
import torch

from llmq.quantize.formats.scheme import ActivationScheme
from llmq.runtime.layers.rounded_input import rounded

SCHEMES = {
    ("float", 4, 16): {"dynamic": "local", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    ("float", 4, 32): {"dynamic": True, "strategy": "group", "scale_dtype": "torch.uint8"},
    ("float", 8, 32): {"dynamic": True, "strategy": "group"},
    ("float", 8, None): {"dynamic": True, "strategy": "token"},
    ("int", 8, None): {"dynamic": True, "strategy": "token"},
}


@pytest.mark.parametrize(("kind", "bits", "group_size"), SCHEMES)
def test_rounding_equals_compressed_tensors(kind, bits, group_size):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x[1, :16], x[2, 3] = 0.0, 90.0  # a group of zeros, an outlier
    args = QuantizationArgs(
        type=kind, num_bits=bits, group_size=group_size, symmetric=True, **SCHEMES[kind, bits, group_size]
    )
    global_scale = torch.tensor(150.0) if (bits, group_size) == (4, 16) else None
    tokens = x if group_size else x[None]  # theirs counts tokens in the second dimension
    scale, zero = compute_dynamic_scales_and_zp(tokens, args, torch.nn.Linear(64, 1), global_scale)
    expected = fake_quantize(tokens, scale, zero, args, global_scale).view(x.shape)
    made = rounded(x, ActivationScheme(kind, bits, True, group_size), global_scale)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)
