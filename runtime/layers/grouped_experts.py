"""A sparse mixture whose experts are computed together, by kernels that find each expert's rows on the device."""

import torch
from torch import Tensor

from llmq.runtime.kernels.triton.launch import Target
from llmq.runtime.kernels.triton.row_kernels import gate
from llmq.runtime.kernels.triton.weight_only import ChunkedWeight, expert_tiles, grouped_rows, multiply_grouped
from llmq.runtime.layers.mlp import Experts
from llmq.runtime.layers.triton_linear import TritonWeightOnlyLinear


class GroupedExperts:
    """`Experts` with two launches for all experts, and no number that the host has to wait for."""

    def __init__(self, experts: Experts, wide: ChunkedWeight, out: ChunkedWeight, activation: str) -> None:
        self.experts, self.wide, self.out, self.activation = experts, wide, out, activation

    @classmethod
    def of(cls, experts: Experts, activation: str | None) -> "GroupedExperts | None":
        """None where the experts' weights are not alike, or of a kind without a kernel. The experts' own linears
        become views of the stacked weights, so that nothing is held twice."""
        stacked = []
        for linears in zip(*(mlp.linears for mlp in experts.experts), strict=True):
            if not all(_is_plain(linear) for linear in linears):
                return None
            stacked.append(ChunkedWeight.stack([linear.weight for linear in linears]))
        if activation is None or any(weight is None for weight in stacked):
            return None
        for index, mlp in enumerate(experts.experts):
            for linear, weight in zip(mlp.linears, stacked, strict=True):
                linear.weight = weight.expert(index)
        return cls(experts, *stacked, activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        experts, target = self.experts, Target.of(x.device)
        weights, chosen = experts.route(x)
        pairs = chosen.flatten()  # (token, choice)
        order = pairs.argsort(stable=True)
        counts = torch.zeros(len(experts.experts), dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, pairs, torch.ones_like(pairs))
        num_rows = len(order)
        tile_rows = grouped_rows(num_rows, len(experts.experts))
        tiles = expert_tiles(counts, num_rows, tile_rows)
        rows = x[order // experts.per_token]
        wide = rows.new_empty(num_rows, self.wide.shape[0])
        multiply_grouped(rows, self.wide, tiles, tile_rows, wide, target).run()
        gated = rows.new_empty(num_rows, self.wide.shape[0] // 2)
        gate(wide, self.activation, gated).run()
        parts = rows.new_empty(num_rows, self.out.shape[0])
        multiply_grouped(gated, self.out, tiles, tile_rows, parts, target).run()
        outputs = torch.empty_like(parts)
        outputs[order] = parts
        return (outputs.unflatten(0, chosen.shape) * weights[..., None]).sum(dim=1).to(x.dtype)


def _is_plain(linear: object) -> bool:
    return isinstance(linear, TritonWeightOnlyLinear) and linear.bias is None and linear.column_order is None
