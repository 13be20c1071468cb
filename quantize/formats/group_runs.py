"""Columns cut out of a weight in activation order, as groups of one size again.

A tensor-parallel rank has some input columns of a weight whose groups lie across all of the input: of each group it has
as many as fall to it. Sorted by their group, and each group's filled up to whole runs of RUN columns of weight zero,
they are an ordinary weight in groups of RUN, which every kernel multiplies. Of n columns of G groups at most
G (RUN - 1) are filled up: with 2 ranks and groups of 128 a quarter more, where dequantizing at each call moves nine
times the bytes.
"""

import torch
from torch import Tensor

RUN = 32  # what all kernels take: Triton's chunks, torch's packed int4


def grouped_in_runs(
    numbers: Tensor, groups: Tensor, scale: Tensor, zero: Tensor | None, middle: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(numbers, scale, zero, column order) of columns in runs.

    numbers: unsigned [out, n], a column each; groups: [n], the group of each; scale, zero: [out, groups], zero counted
    from `middle`, which is the zero of a symmetric weight. The column order says which of the n inputs each column
    multiplies; those of weight zero multiply one of their own group's, whatever scales of the input a group may have.
    """
    order = torch.argsort(groups, stable=True)
    counts = torch.bincount(groups, minlength=scale.shape[1])
    runs = (counts + RUN - 1) // RUN
    group_of_run = torch.arange(len(runs), device=groups.device).repeat_interleave(runs)
    firsts = counts.cumsum(0) - counts  # of each group among the sorted columns,
    starts = RUN * (runs.cumsum(0) - runs)  # and in the result
    of_sorted = groups[order]
    slots = starts[of_sorted] + torch.arange(len(order), device=groups.device) - firsts[of_sorted]
    column_order = order[firsts[group_of_run]].repeat_interleave(RUN)
    column_order[slots] = order
    in_runs = torch.full((len(numbers), len(column_order)), middle, dtype=numbers.dtype, device=numbers.device)
    if zero is not None:
        zero = zero[:, group_of_run]
        in_runs = (zero.to(torch.int16) + middle).to(numbers.dtype).repeat_interleave(RUN, dim=1)
    in_runs[:, slots] = numbers[:, order]
    return in_runs, scale[:, group_of_run], zero, column_order
