"""KVStore: the tensors behind the blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from llmq.profiles.kv_spec import KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.kv_codec import SCALE_DTYPE, KVCodec, make_codec
from llmq.runtime.staging import staging_of

_LINE_BYTES = 64

# Of native attention's blocks.
TILE_TOKENS = 16
_TILE_UNIT = 4  # bytes

# layer -> the static scales of its K and of its V
StaticScales = Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class Slots:
    """Where each new token of a step goes, in one group: block and offset in it, each [num_tokens]."""

    block: Tensor
    offset: Tensor

    @classmethod
    def of(cls, slot_mapping: Tensor, block_tokens: int) -> "Slots":
        return cls(slot_mapping // block_tokens, slot_mapping % block_tokens)


class KVOrder(Enum):
    """How numbers of several tokens and heads lie in a block: runtime/kernels/native/kv_plane.h."""

    by_token = "by_token"
    by_head = "by_head"
    by_unit = "by_unit"


@dataclass(frozen=True)
class StoredPart:
    """K or V of one layer in every block.

    The payload is, for items of the codec, of which a head has head_dim / elements_per_item,

        by_token  [num_blocks, block_tokens, num_kv_heads, items]
        by_head   [num_blocks, block_tokens / TILE_TOKENS, num_kv_heads, TILE_TOKENS, items]
        by_unit   [num_blocks, block_tokens / TILE_TOKENS, num_kv_heads, units, TILE_TOKENS], int32: four bytes of items
    """

    codec: KVCodec
    payload: Tensor
    scales: Tensor | None  # [num_blocks, block_tokens, num_kv_heads]
    order: KVOrder

    def write(self, x: Tensor, slots: Slots) -> None:
        payload, scales = self.codec.encode(x)
        tile, token = slots.offset // TILE_TOKENS, slots.offset % TILE_TOKENS
        if self.order == KVOrder.by_token:
            self.payload[slots.block, slots.offset] = payload
        elif self.order == KVOrder.by_head:
            self.payload[slots.block, tile, :, token] = payload
        else:
            self.payload[slots.block, tile, :, :, token] = payload.contiguous().view(torch.int32)
        if scales is not None:
            self.scales[slots.block, slots.offset] = scales

    def read(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        payload = self.payload[table]
        if self.order == KVOrder.by_head:
            payload = payload.transpose(-3, -2).flatten(-4, -3)
        elif self.order == KVOrder.by_unit:
            tokens = payload.movedim(-1, -3).flatten(-4, -3)
            # A copy even of what counts as contiguous: of a single unit the stride may be any.
            payload = tokens.clone(memory_format=torch.contiguous_format).view(self.codec.payload_dtype)
        scales = None if self.scales is None else self.scales[table]
        return self.codec.decode(payload, scales, dtype)


class KVStore:
    """`num_blocks` blocks of `layout.block_bytes` bytes, one after the other.

    A block of a group with layers L0, L1, … and T tokens a block is laid out as

        | L0: K [T, num_kv_heads, head_dim_k] | K's scales [T, num_kv_heads] | L0: V | V's scales | L1: K | …

    so that a block is one contiguous piece, whatever group it serves: copied, moved or sent with one call. Dtypes
    without dynamic scales leave those out.

    For native attention K lies unit by unit, as a vector multiplies it, and V head by head, where T, and of K a head's
    bytes, allow it: the same numbers in the same bytes of a block, in another order.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_blocks: int,
        device: torch.device,
        static_scales: StaticScales | None = None,
        *,
        in_tiles: bool = False,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.staging = staging_of(device)  # for all numbers that a step brings along
        self.clears_unwritten = False  # set by a program whose attention reads such slots
        self._blocks = _zeros(num_blocks * layout.block_bytes, device).view(num_blocks, layout.block_bytes)
        self._parts: dict[int, tuple[StoredPart, StoredPart]] = {}
        for group in layout.groups:
            offset = 0
            for layer in group.layers:
                k_scale, v_scale = (static_scales or {}).get(layer, (None, None))
                orders = (KVOrder.by_unit, KVOrder.by_head) if in_tiles else (KVOrder.by_token,) * 2
                keys, offset = self._part(group, group.spec.head_dim_k, offset, k_scale, orders[0])
                values, offset = self._part(group, group.spec.head_dim_v, offset, v_scale, orders[1])
                self._parts[layer] = (keys, values)

    @property
    def num_bytes(self) -> int:
        return self._blocks.numel()

    @property
    def device(self) -> torch.device:
        return self._blocks.device

    def spec(self, layer: int) -> KVCacheSpec:
        return next(group.spec for group in self.layout.groups if layer in group.layers)

    def parts(self, layer: int) -> tuple[StoredPart, StoredPart]:
        """Where K and V of `layer` lie, for kernels that read them in place."""
        return self._parts[layer]

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Slots) -> None:
        """Store keys and values [num_tokens, num_kv_heads, head_dim] of new tokens at their slots."""
        for part, x in zip(self._parts[layer], (keys, values), strict=True):
            part.write(x, slots)

    def read(self, layer: int, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks in `table`, as stored: [*table.shape, block_tokens, num_kv_heads, head_dim]."""
        keys, values = self._parts[layer]
        return keys.read(table, dtype), values.read(table, dtype)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each: what a copy-on-write of a shared block needs."""
        if copies:
            source, target = self.staging.send_integers(copies).T
            self._blocks[target] = self._blocks[source]

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that change hands and are not filled at once, where `clears_unwritten`: slots not yet written are
        read behind a mask then, where 0 × NaN is NaN, and a request whose activations overflowed must leave nothing to
        the next."""
        if not self.clears_unwritten:
            return
        if self.device.type == "cpu":
            # Not by torch: it shares a block out to its threads, which then spin beside those of the next step.
            blocks = self._blocks.numpy()
            for block_id in block_ids:
                blocks[block_id].fill(0)
        elif block_ids:
            self._blocks[self.staging.send_integers(block_ids)] = 0

    def _part(
        self, group: KVCacheGroup, head_dim: int, offset: int, static_scale: float | None, order: KVOrder
    ) -> tuple[StoredPart, int]:
        """K or V of one layer, starting `offset` bytes into each block, and where it ends. order: if it can be."""
        tokens, heads = group.block_tokens, group.spec.num_kv_heads
        codec = make_codec(group.spec.dtype, static_scale)
        dtype, items = codec.payload_dtype, head_dim // codec.elements_per_item
        units, rest = divmod(items * dtype.itemsize, _TILE_UNIT)
        tiles, rest_of_block = divmod(tokens, TILE_TOKENS)
        if rest_of_block or (order == KVOrder.by_unit and rest):
            order = KVOrder.by_token
        shape: tuple[int, ...] = (tokens, heads, items)
        if order == KVOrder.by_head:
            shape = (tiles, heads, TILE_TOKENS, items)
        elif order == KVOrder.by_unit:
            dtype, shape = torch.int32, (tiles, heads, units, TILE_TOKENS)
        payload, offset = self._view(offset, dtype, shape)
        scales = None
        if codec.has_scales:
            scales, offset = self._view(offset, SCALE_DTYPE, (tokens, heads))
        return StoredPart(codec, payload, scales, order), offset

    def _view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        return self._blocks[:, offset:end].view(dtype).unflatten(1, shape), end


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """As after `clear_blocks`, on a cache line. On a CPU pages are committed when they are first written: torch.zeros
    writes all of them, which of a pool of 4 GiB takes a second or more, and the memory from whoever else needs it."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = np.zeros(num_bytes + _LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes])
