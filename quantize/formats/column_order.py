"""Activation order: a stored group index of each input column, made into groups that lie together.

GPTQ (Frantar et al. 2022, section 3.3, and its "act-order") quantizes columns in the order of falling Hessian diagonal
and starts a group with every `group_size` of them; the columns are stored where they were, each with its group's index
(`g_idx`). Sorted by it, a weight is an ordinary grouped one whose input is reordered first.
"""

import torch
from torch import Tensor

from llmq.quantize.formats.packing import pack_unsigned, unpack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import FormatError, WeightScheme


def column_order(module_name: str, scheme: WeightScheme, in_features: int, g_idx: Tensor) -> Tensor | None:
    """The order that sorts columns by their group (int64 [in]); None: as they came."""
    order = torch.argsort(g_idx.to(torch.int64), stable=True)
    expected = torch.arange(in_features, device=g_idx.device) // (scheme.group_size or in_features)
    if g_idx.shape[0] != in_features or not torch.equal(g_idx[order].to(torch.int64), expected):
        raise FormatError(
            f"{module_name}: its group index does not give each group {scheme.group_size} of {in_features} columns"
        )
    return None if torch.equal(order, torch.arange(in_features, device=order.device)) else order


def sorted_columns(values: Tensor, bits: int, order: Tensor) -> Tensor:
    """Packed values [rows, words], their columns in `order`."""
    numbers = unpack_unsigned(values, bits, len(order))
    return pack_unsigned(numbers.index_select(1, order), bits)


def stored_values(weight: QuantizedWeight) -> Tensor:
    """The packed values with their columns in the order of the input again."""
    if weight.column_order is None:
        return weight.values
    numbers = unpack_unsigned(weight.values, weight.scheme.bits, weight.in_features)
    return pack_unsigned(torch.empty_like(numbers).index_copy_(1, weight.column_order, numbers), weight.scheme.bits)


def group_index(weight: QuantizedWeight) -> Tensor:
    """The group of each input column, int32 [in]."""
    index = torch.arange(weight.in_features, dtype=torch.int32, device=weight.values.device)
    index //= weight.scheme.group_size or weight.in_features
    if weight.column_order is None:
        return index
    return torch.empty_like(index).index_copy_(0, weight.column_order, index)
