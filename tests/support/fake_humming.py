"""humming.layer's HummingLayer as version 0.1.19 has it, for dense uint4 weights: the tensors by name, shape and dtype,
as its schema wants them; the product by its own definition of what they mean."""

import torch


def unpack(words):
    """int32 [rows, n] -> [rows, 8 n]: the first of 8 numbers in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    return ((words[..., None].long() >> shifts) & 15).flatten(-2)


class HummingLayer(torch.nn.Module):
    def __init__(self, *, shape_n, shape_k, weight_config, has_bias=False, torch_dtype):
        super().__init__()
        assert weight_config["dtype"] == "uint4"
        assert torch_dtype in (torch.float16, torch.bfloat16)
        self.shape, self.is_transformed = (shape_n, shape_k), False
        group = weight_config["group_size"] or shape_k
        shapes = {
            "weight": ((shape_n, shape_k // 8), torch.int32),
            "weight_scale": ((shape_n, shape_k // group), torch_dtype),
        }
        if weight_config["has_zero_point"]:
            shapes["zero_point"] = ((shape_n // 8, shape_k // group), torch.int32)
        if has_bias:
            shapes["bias"] = ((shape_n,), torch_dtype)
        for name, (shape, dtype) in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def load_from_tensors(self, tensors):
        own = dict(self.named_parameters())
        assert tensors.keys() == own.keys()
        for name, tensor in tensors.items():
            assert (tensor.shape, tensor.dtype) == (own[name].shape, own[name].dtype), name
        self.load_state_dict(tensors)

    def transform(self):
        self.is_transformed = True

    def forward(self, inputs):
        assert self.is_transformed
        assert inputs.is_contiguous()
        weight = unpack(self.weight).float()
        repeats = weight.shape[1] // self.weight_scale.shape[1]
        if hasattr(self, "zero_point"):
            zeros = unpack(self.zero_point.t()).t()
            weight -= zeros.float().repeat_interleave(repeats, dim=1)
        else:
            weight -= 8
        weight *= self.weight_scale.float().repeat_interleave(repeats, dim=1)
        y = inputs.float() @ weight.t()
        return (y + self.bias.float() if hasattr(self, "bias") else y).to(inputs.dtype)
