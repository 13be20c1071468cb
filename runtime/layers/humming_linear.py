"""W4A16 by humming (github.com/inclusionAI/humming, package humming-kernels), where it is installed and right.

Its layer takes what a checkpoint stores: rows of packed u, scales and zero points of groups,

    weight[o, j] = (u[o, j] - zero[o, g(j)]) · scale[o, g(j)]        or, symmetric,  (u[o, j] - 8) · scale[o, g(j)]

with u in int32 words along the columns, the first number in the lowest bits, and unsigned zero points packed likewise
along the rows. It puts them into an order of its own and compiles a kernel for each shape when that is first called.
"""

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from llmq.quantize.formats.packing import pack_int32, unpack_int32
from llmq.runtime.kernels.optional import HUMMING
from llmq.runtime.kernels.triton.weight_only import INT4, ChunkedWeight
from llmq.runtime.layers.mlp import MLP
from llmq.runtime.layers.self_attention import SelfAttention
from llmq.runtime.layers.triton_linear import TritonWeightOnlyLinear
from llmq.runtime.models.decoder import Decoder

OLDEST_CAPABILITY = (8, 0)
_MULTIPLE = 64  # of both sizes: what its tiles divide into without padding
_PARTS = {SelfAttention: ("qkv", "o"), MLP: ("wide", "out")}
# Rows and outputs that are compared before it is trusted, and how far apart: its sums are in another order.
_TRIED_ROWS, _TRIED_OUTPUTS, _MOST_ERROR = 5, 128, 1e-2


class HummingLinear:
    kernel = "humming int4 × 16 bit"

    def __init__(self, module: ModuleType, tensors: "dict[str, Tensor]", order: Tensor | None, group_size: int) -> None:
        """tensors: in its layout (`humming_tensors`), scales in the dtype of the activations. group_size 0: a row."""
        rows, words = tensors["weight"].shape
        self.column_order = order
        self.layer = module.HummingLayer(
            shape_n=rows,
            shape_k=words * 8,
            weight_config={"dtype": "uint4", "group_size": group_size, "has_zero_point": "zero_point" in tensors},
            has_bias="bias" in tensors,
            torch_dtype=tensors["weight_scale"].dtype,
        ).to(tensors["weight"].device)
        self.layer.load_from_tensors(tensors)
        self.layer.transform()
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values()) + (0 if order is None else order.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous() if self.column_order is None else x.index_select(1, self.column_order)
        return self.layer(x)


def humming_tensors(linear: TritonWeightOnlyLinear, dtype: torch.dtype) -> "dict[str, Tensor] | None":
    """What its layer loads of a linear of our own; None where it takes no such weight, or not to the bit."""
    weight = linear.weight
    rows, columns = weight.shape
    is_float_offset = weight.offsets is not None and weight.offsets.dtype != torch.int8
    if weight.format != INT4 or rows % _MULTIPLE or columns % _MULTIPLE or is_float_offset:
        return None
    scales = weight.scales[0].t().contiguous()  # [rows, groups]
    if not torch.equal(scales.to(dtype).float(), scales.float()):
        return None
    tensors = {"weight": _words(weight), "weight_scale": scales.to(dtype)}
    if weight.offsets is not None:
        tensors["zero_point"] = pack_int32(weight.offsets[0].contiguous(), 4).t().contiguous()  # [rows / 8, groups]
    if linear.bias is not None:
        tensors["bias"] = linear.bias
    return tensors


def dequantize(tensors: "dict[str, Tensor]", num_rows: int) -> Tensor:
    """float32 [num_rows, columns] of a weight in its layout, from its first rows."""
    columns = tensors["weight"].shape[1] * 8
    numbers = unpack_int32(tensors["weight"][:num_rows], 4, columns).float()  # u - 8
    scales = tensors["weight_scale"][:num_rows].float()
    repeats = columns // scales.shape[1]
    if "zero_point" in tensors:
        zeros = unpack_int32(tensors["zero_point"].t().contiguous(), 4, tensors["weight"].shape[0])
        numbers -= zeros.t()[:num_rows].float().repeat_interleave(repeats, dim=1)
    return numbers * scales.repeat_interleave(repeats, dim=1)


def use_humming(
    decoder: Decoder,
    dtype: torch.dtype,
    *,
    capability: tuple[int, int],
    import_module: Callable[[str], ModuleType] = importlib.import_module,
) -> str:
    """Put humming in the place of Triton's int4 linears, experts aside. Returns what was picked, or why it was not.

    Each shape is first compared with the product by its definition: one that fails or differs leaves all as they were.
    """
    if (why_not := HUMMING.why_not()) is not None:
        return f"no humming: {why_not}"
    said = f"no humming: {HUMMING.distribution} {HUMMING.version()} is installed, but"
    if capability < OLDEST_CAPABILITY:
        return f"{said} this GPU is older than Ampere"
    found = [
        (part, name, tensors)
        for part in (block.part for block in decoder.blocks)
        for name in _PARTS.get(type(part), ())
        if isinstance(linear := getattr(part, name), TritonWeightOnlyLinear)
        and (tensors := humming_tensors(linear, dtype)) is not None
    ]
    if not found:
        return f"{said} no linear here is in int4 as it takes them"
    made: list[HummingLinear] = []
    tried: set[tuple[object, ...]] = set()
    try:
        module = import_module("humming.layer")
        for part, name, tensors in found:
            old = getattr(part, name)
            size = old.weight.group_size if old.weight.scales.shape[1] > 1 else 0
            linear = HummingLinear(module, tensors, old.column_order, size)
            kind = (*old.weight.shape, size, "zero_point" in tensors, "bias" in tensors)
            if kind not in tried and (error := _error(linear, tensors)) > _MOST_ERROR:
                return f"{said} its product of {old.weight.shape} is {error:.1%} from the weight's"
            tried.add(kind)
            made.append(linear)
    except Exception as error:  # of its import, its compiler, the driver
        words = (str(error) or repr(error)).strip().splitlines()
        return f"{said} fails here: {words[0] if words else type(error).__name__}"
    for (part, name, _), linear in zip(found, made, strict=True):
        setattr(part, name, linear)
        part.linears = [getattr(part, one) for one in _PARTS[type(part)]]
    return f"{HUMMING.what_for} by {HUMMING.distribution} {HUMMING.version()}"


def _error(linear: HummingLinear, tensors: "dict[str, Tensor]") -> float:
    """Of some outputs, relative."""
    weight = dequantize(tensors, _TRIED_OUTPUTS)
    x = torch.randn(_TRIED_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, tensors["weight_scale"].dtype)
    ordered = x if linear.column_order is None else x.index_select(1, linear.column_order)
    exact = ordered.float() @ weight.t()
    if "bias" in tensors:
        exact += tensors["bias"][:_TRIED_OUTPUTS].float()
    made = linear(x)[:, :_TRIED_OUTPUTS].float()
    return float((made - exact).norm() / exact.norm())


def _words(weight: ChunkedWeight) -> Tensor:
    """int32 [rows, columns / 8], as a checkpoint stores them."""
    return weight.numbers[0].transpose(0, 1).reshape(weight.shape[0], weight.shape[1] // 8)
