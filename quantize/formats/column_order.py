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


def sorted_columns(
    module_name: str, scheme: WeightScheme, shape: tuple[int, int], values: Tensor, g_idx: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Packed values [rows, words], their columns sorted by group, and that order (int64 [in]; None: as they came)."""
    order = torch.argsort(g_idx.to(torch.int64), stable=True)
    expected = torch.arange(shape[1], device=g_idx.device) // (scheme.group_size or shape[1])
    if g_idx.shape[0] != shape[1] or not torch.equal(g_idx[order].to(torch.int64), expected):
        raise FormatError(
            f"{module_name}: its group index does not give each group {scheme.group_size} of {shape[1]} columns"
        )
    if torch.equal(order, torch.arange(shape[1], device=order.device)):
        return values, None
    numbers = unpack_unsigned(values, scheme.bits, shape[1])
    return pack_unsigned(numbers.index_select(1, order), scheme.bits), order


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
