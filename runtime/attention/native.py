"""Paged attention by our own kernels, which read K and V where they lie: `runtime/kernels/native/attention.h`."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llmq.profiles.kv_spec import KVCacheLayout, KVCacheSpec
from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.dtypes import NativeNumerics
from llmq.runtime.kernels import native
from llmq.runtime.kv_store import KVStore, StoredPart

DTYPES = (torch.bfloat16, torch.float32)
_MULTIPLY_BYTES = ("avx512_vnni", "avx512_bf16", "amx")  # the others' words have 16 bits at the same speed


@dataclass(frozen=True)
class PreparedPlan:
    """A step of one group as the kernels take it, and the tensors that it points into."""

    plan: "native.AttentionPlan"
    tensors: tuple[Tensor, ...]


class NativeAttention:
    """Softmax over spans of keys, merged in order, counted from the start of a sequence: what a query gets does
    not depend, in any bit, on what else a step computes."""

    reads_unwritten = False

    def __init__(self, rounds_to_bytes: bool = False) -> None:
        """rounds_to_bytes: what integers of K and V are multiplied with, to 8 bits: see `rounds_to_bytes`."""
        self.name = f"native {native.isa()}" + (" × int8" if rounds_to_bytes else "")
        self._rounds_to_bytes = rounds_to_bytes
        self._planes: WeakKeyDictionary[KVStore, list[tuple[native.KVPlane, native.KVPlane]]] = WeakKeyDictionary()

    @staticmethod
    def runs(layout: KVCacheLayout, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernels of this machine serve queries of `dtype` over a store of this layout."""
        specs = [group.spec for group in layout.groups]
        return (
            native is not None
            and device.type == "cpu"
            and dtype in DTYPES
            and all(max(spec.head_dim_k, spec.head_dim_v) <= native.MOST_HEAD_DIM for spec in specs)
        )

    def prepare(self, metadata: AttentionMetadata) -> PreparedPlan:
        query_start, lengths = (
            torch.tensor(numbers, dtype=torch.int32) for numbers in (metadata.query_start_loc, metadata.seq_lens)
        )
        table, plan = metadata.block_table, native.AttentionPlan()
        plan.start(
            num_sequences=len(metadata.seq_lens),
            query_start=query_start.data_ptr(),
            lengths=lengths.data_ptr(),
            block_table=table.data_ptr(),
            table_stride=table.stride(0),
            block_tokens=metadata.block_tokens,
            window=metadata.window or 0,
            rounds_to_bytes=self._rounds_to_bytes,
        )
        return PreparedPlan(plan, (query_start, lengths, table))

    def __call__(
        self,
        queries: Tensor,
        layer: int,
        store: KVStore,
        prepared: PreparedPlan,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        keys, values = self.planes(store)[layer]
        num_tokens, num_heads, head_dim = queries.shape
        if queries.stride()[1:] != (head_dim, 1):
            queries = queries.contiguous()
        output = queries.new_empty(num_tokens, num_heads, values.head_dim)
        prepared.plan.attend(
            queries.data_ptr(),
            queries.stride(0),
            output.data_ptr(),
            output.stride(0),
            queries.dtype == torch.float32,
            num_heads,
            scale,
            softcap or 0.0,
            keys,
            values,
        )
        return output

    def planes(self, store: KVStore) -> "list[tuple[native.KVPlane, native.KVPlane]]":
        """K and V of each layer of a store."""
        if store not in self._planes:
            self._planes[store] = native_planes(store)
        return self._planes[store]


def rounds_to_bytes(numerics: NativeNumerics | None, layout: KVCacheLayout) -> bool:
    """Whether queries and the softmax's weights are to be rounded to 8 bits: beside integers of K and V, where this
    machine has an instruction for that."""
    has_integers = any(group.spec.dtype.name in ("int8", "int4") for group in layout.groups)
    return numerics is not None and numerics.int8_activations and has_integers and native.isa() in _MULTIPLY_BYTES


def native_planes(store: KVStore) -> "list[tuple[native.KVPlane, native.KVPlane]]":
    """K and V of each layer as the kernels take them, valid as long as the store."""
    num_layers = sum(len(group.layers) for group in store.layout.groups)
    planes = []
    for layer in range(num_layers):
        spec, (keys, values) = store.spec(layer), store.parts(layer)
        planes.append((_plane(store, spec, keys, spec.head_dim_k), _plane(store, spec, values, spec.head_dim_v)))
    return planes


def _plane(store: KVStore, spec: KVCacheSpec, part: StoredPart, head_dim: int) -> "native.KVPlane":
    static_scale = getattr(part.codec, "static_scale", None)
    return native.KVPlane(
        payload=part.payload.data_ptr(),
        scales=0 if part.scales is None else part.scales.data_ptr(),
        block_stride=store.layout.block_bytes,
        static_scale=1.0 if static_scale is None else static_scale,
        num_kv_heads=part.payload.shape[2],
        head_dim=head_dim,
        format=getattr(native.KVFormat, spec.dtype.name),
        order=getattr(native.KVOrder, part.order.name),
    )
