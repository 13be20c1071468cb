"""Paged attention by FlashInfer (Ye et al. 2025, arXiv 2501.01005), where it is installed and takes what is asked.

Its wrappers read the blocks where they lie: K and V of a layer are views of the store, [blocks, block tokens, KV heads,
head_dim] ("NHD") with the strides of whole blocks. A wrapper is planned on the host for one step, then run for each
layer that is asked for the same.
"""

import importlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.kernels.optional import FLASHINFER
from llmq.runtime.kv_store import KVStore, Slots

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128, 256)
OLDEST_CAPABILITY = (8, 0)
WORKSPACE_BYTES = 128 * 2**20  # for the partial sums of split sequences, as its documentation has it
# A plan is copied from pinned memory of the wrapper's own: while that is on its way the next step plans another.
NUM_WRAPPERS = 2
# Its decode kernel without tensor cores is compiled for a few group sizes, and reads K and V once for each head.
_PLAIN_GROUPS = (1, 2)


@dataclass(frozen=True)
class _Shape:
    """What a plan is made for, beside a step's sequences."""

    is_decode: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    dtype: torch.dtype


@dataclass(frozen=True)
class _Pages:
    """A step's blocks as rows of a compressed sparse matrix: what begins where lies on the host, for plans."""

    starts: Tensor  # int32 [num_seqs + 1]
    indices: Tensor  # int32 [blocks of all sequences], on the device
    last_tokens: Tensor  # int32 [num_seqs], in the last block of each


@dataclass
class PlannedStep:
    metadata: AttentionMetadata
    pages: _Pages
    planned: dict[_Shape, Any] = field(default_factory=dict)


class FlashInferAttention:
    name = "flashinfer"
    reads_unwritten = True

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module, self._device = module, device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Shape, deque[Any]] = {}

    def prepare(self, metadata: AttentionMetadata) -> PlannedStep:
        return PlannedStep(metadata, _pages(metadata))

    def __call__(
        self,
        queries: Tensor,
        layer: int,
        store: KVStore,
        prepared: PlannedStep,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        spec, (keys, values) = store.spec(layer), store.parts(layer)
        metadata = prepared.metadata
        shape = _Shape(
            is_decode=len(queries) == len(metadata.seq_lens),
            num_heads=queries.shape[1],
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim_k,
            scale=scale,
            softcap=softcap,
            window=metadata.window,
            dtype=queries.dtype,
        )
        if shape not in prepared.planned:
            prepared.planned[shape] = self._plan(shape, prepared)
        return prepared.planned[shape].run(queries.contiguous(), (keys.payload, values.payload))

    def _plan(self, shape: _Shape, step: PlannedStep) -> Any:
        """The wrapper that is next in turn for such steps, planned for this one."""
        wrappers = self._wrappers.setdefault(shape, deque())
        wrapper = self._wrapper(shape) if len(wrappers) < NUM_WRAPPERS else wrappers.popleft()
        wrappers.append(wrapper)
        pages, sizes = step.pages, (shape.num_heads, shape.num_kv_heads, shape.head_dim, step.metadata.block_tokens)
        options = {
            "sm_scale": shape.scale,
            "window_left": -1 if shape.window is None else shape.window - 1,
            "logits_soft_cap": shape.softcap,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        if shape.is_decode:
            wrapper.plan(pages.starts, pages.indices, pages.last_tokens, *sizes, **options)
        else:
            begins = torch.tensor(step.metadata.query_start_loc, dtype=torch.int32)
            wrapper.plan(begins, pages.starts, pages.indices, pages.last_tokens, *sizes, causal=True, **options)
        return wrapper

    def _wrapper(self, shape: _Shape) -> Any:
        if not shape.is_decode:
            return self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        plain = shape.num_heads // shape.num_kv_heads in _PLAIN_GROUPS
        return self._module.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=not plain)


def choose_flashinfer(
    store: KVStore,
    dtype: torch.dtype,
    group_size: int,
    *,
    capability: tuple[int, int] | None = None,
    import_module: Callable[[str], ModuleType] = importlib.import_module,
) -> tuple[FlashInferAttention | None, str]:
    """(FlashInfer's attention where it serves every layer of this store, why it does not), for queries of `dtype` of
    which `group_size` heads share a KV head. It is imported, and tried on a block of each kind of layer: it compiles
    its kernels when they are first called, which takes a compiler that is not on every machine."""
    if (why_not := FLASHINFER.why_not()) is not None:
        return None, why_not
    if capability is None:
        capability = torch.cuda.get_device_capability(store.device)
    said = f"{FLASHINFER.distribution} {FLASHINFER.version()} is installed, but"
    if capability < OLDEST_CAPABILITY:
        return None, f"{said} this GPU is older than Ampere"
    for group in store.layout.groups:
        spec = group.spec
        if DTYPES.get(spec.dtype.name) != dtype:
            return None, f"{said} KV blocks are in {spec.dtype.name}, and it is used for 16 bit as the activations are"
        if spec.head_dim_k != spec.head_dim_v or spec.head_dim_k not in HEAD_DIMS:
            return None, f"{said} heads of {spec.head_dim_k} and {spec.head_dim_v} are none of {HEAD_DIMS}"
        if spec.chunked:
            return None, f"{said} attention in chunks is none of its windows"
    try:
        attention = FlashInferAttention(import_module("flashinfer"), store.device)
        for index in range(len(store.layout.groups)):
            _try(attention, store, index, dtype, group_size)
    except Exception as error:  # of its import, its compiler, the driver
        words = (str(error) or repr(error)).strip().splitlines()
        return None, f"{said} fails here: {words[0] if words else type(error).__name__}"
    return attention, f"{FLASHINFER.distribution} {FLASHINFER.version()}"


def _try(attention: FlashInferAttention, store: KVStore, index: int, dtype: torch.dtype, group_size: int) -> None:
    """One step of each kind over the store's first block, whatever is in it."""
    group, device = store.layout.groups[index], store.device
    for queries in (1, min(2, group.block_tokens)):
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        metadata = AttentionMetadata(
            query_start_loc=[0, queries],
            seq_lens=[queries],
            block_table=torch.zeros(1, 1, dtype=torch.int64, device=device),
            slots=Slots(nothing, nothing),
            block_tokens=group.block_tokens,
            window=group.spec.window,
        )
        heads = group_size * group.spec.num_kv_heads
        x = torch.zeros(queries, heads, group.spec.head_dim_k, dtype=dtype, device=device)
        attention(x, group.layers[0], store, attention.prepare(metadata), 1.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pages(metadata: AttentionMetadata) -> _Pages:
    lengths = torch.tensor(metadata.seq_lens)
    counts = -(-lengths // metadata.block_tokens)
    starts = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, dim=0, out=starts[1:])
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    columns = torch.arange(int(starts[-1])) - starts[rows]
    places = rows * metadata.block_table.shape[1] + columns
    if metadata.block_table.device.type == "cuda":
        places = places.pin_memory()
    places = places.to(metadata.block_table.device, non_blocking=True)
    return _Pages(
        starts.int(),
        metadata.block_table.flatten()[places].int(),
        (lengths - (counts - 1) * metadata.block_tokens).int(),
    )
