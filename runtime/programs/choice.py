"""Which program runs a model here, and why not the fast one."""

import torch

from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.attention.native import NativeAttention
from llmq.runtime.attention.sdpa import SdpaAttention
from llmq.runtime.attention.tiled import TiledAttention
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
    native: bool = True,
) -> Program:
    """The native program where a decoder lowers to one, else torch with the fastest attention that there is.

    group_size: query heads that share a KV head. batch_invariant: no result depends on what else a step computes, which
    is so of the native program and of one attention for torch. native: our own kernels may run.
    """
    why_not = None
    if native and store.device.type == "cpu":
        if not isinstance(model, Decoder):
            why_not = "the model's code is not llmq's own"
        else:
            try:
                return NativeProgram(model, store)
            except NotLoweredError as reason:
                why_not = str(reason)
    attention: AttentionBackend = SdpaAttention()
    if batch_invariant:
        attention = TiledAttention(group_size)
    elif native and NativeAttention.runs(store, dtype):
        attention = NativeAttention()
    return EagerProgram(model, store, attention, why_not)
