"""Which program runs a model here, and why not the fast one."""

import torch

from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.attention.native import NativeAttention, rounds_to_bytes
from llmq.runtime.attention.sdpa import SdpaAttention
from llmq.runtime.attention.tiled import TiledAttention
from llmq.runtime.dtypes import NativeNumerics
from llmq.runtime.kernels import triton_runs
from llmq.runtime.kv_store import KVStore
from llmq.runtime.models.decoder import Decoder
from llmq.runtime.models.loader import Model
from llmq.runtime.programs.base import Program
from llmq.runtime.programs.eager import EagerProgram
from llmq.runtime.programs.lowering import NotLoweredError
from llmq.runtime.programs.native import NativeProgram


def make_program(
    model: Model,
    store: KVStore,
    dtype: torch.dtype,
    group_size: int,
    batch_invariant: bool = False,
    numerics: NativeNumerics | None = NativeNumerics(),
    graphs: tuple[int, int] | None = None,
    attention: AttentionBackend | None = None,
) -> Program:
    """On a GPU the program of Triton kernels, on a CPU the native one, where a decoder lowers to it; else torch with
    the fastest attention that there is.

    group_size: query heads that share a KV head. batch_invariant: no result depends on what else a step computes, which
    is so of the native program and of one attention for torch. numerics: of our own kernels; None: they do not run.
    graphs: (most sequences, most tokens of one) of decode steps in CUDA graphs; None: none. attention: of another's
    making, for a decoder that runs on Triton kernels.
    """
    why_not, native = None, numerics is not None
    if native and not batch_invariant and triton_runs(store.device.type):
        return _triton_program(model, store, dtype, graphs, attention)
    if native and store.device.type == "cpu":
        if not isinstance(model, Decoder):
            why_not = "the model's code is not llmq's own"
        else:
            try:
                return NativeProgram(model, store, numerics)
            except NotLoweredError as reason:
                why_not = str(reason)
    attention: AttentionBackend = SdpaAttention()
    if batch_invariant:
        attention = TiledAttention(group_size)
    elif native and NativeAttention.runs(store.layout, store.device, dtype):
        attention = NativeAttention(rounds_to_bytes(numerics, store.layout))
    return EagerProgram(model, store, attention, why_not)


def _triton_program(
    model: Model,
    store: KVStore,
    dtype: torch.dtype,
    graphs: tuple[int, int] | None,
    other_attention: AttentionBackend | None,
) -> Program:
    """Of a decoder of our own; else, and for blocks that the kernels do not read, torch with the best attention."""
    # Here, for the package triton is not on every machine.
    from llmq.runtime.attention.triton import TritonAttention
    from llmq.runtime.programs.graphs import GraphedProgram
    from llmq.runtime.programs.triton import TritonProgram

    if not TritonAttention.runs(store, dtype):
        kinds = ", ".join(sorted({group.spec.dtype.name for group in store.layout.groups}))
        return EagerProgram(model, store, SdpaAttention(), f"no Triton attention in {dtype} over blocks of {kinds}")
    if isinstance(model, Decoder):
        program = TritonProgram(model, store, other_attention)
        if graphs is None:
            return program
        graphed = GraphedProgram(program, *graphs)
        graphed.capture()
        return graphed
    return EagerProgram(model, store, TritonAttention(), "the model's code is not llmq's own")
