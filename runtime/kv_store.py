"""KVStore: the tensors behind the blocks."""

import torch

from llmq.profiles.kv_spec import KVCacheLayout

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class KVStore:
    """`num_blocks` blocks of `layout.block_bytes` bytes, one after the other.

    A block of a group with layers L0, L1, … and T tokens a block is laid out as

        | L0: K [T, num_kv_heads, head_dim_k] | L0: V [T, num_kv_heads, head_dim_v] | L1: K | L1: V | …

    so that a block is one contiguous piece, whatever group it serves: copied, moved or sent with one call.
    """

    def __init__(self, layout: KVCacheLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        # zeros: never read as values, but 0 × NaN of an uninitialised slot behind a mask would be NaN. On a CPU the
        # pages are only committed when they are written.
        self._blocks = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in layout.groups:
            spec, dtype = group.spec, TORCH_DTYPES[group.spec.dtype.name]
            elements = self._blocks.view(dtype)  # [num_blocks, elements of a block]
            offset = 0
            for layer in group.layers:
                views = []
                for head_dim in (spec.head_dim_k, spec.head_dim_v):
                    size = group.block_tokens * spec.num_kv_heads * head_dim
                    part = elements[:, offset : offset + size]
                    views.append(part.unflatten(1, (group.block_tokens, spec.num_kv_heads, head_dim)))
                    offset += size
                self._views[layer] = (views[0], views[1])

    @property
    def num_bytes(self) -> int:
        return self._blocks.numel()

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each [num_blocks, block_tokens, num_kv_heads, head_dim], strided views."""
        return self._views[layer]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: "Slots") -> None:
        """Store keys and values [num_tokens, num_kv_heads, head_dim] of new tokens at their slots."""
        k_blocks, v_blocks = self._views[layer]
        index = (slots.block, slots.offset)
        k_blocks.index_put_(index, keys.to(k_blocks.dtype))
        v_blocks.index_put_(index, values.to(v_blocks.dtype))


class Slots:
    """Where each new token of a step goes, in one group: block and offset in it, each [num_tokens]."""

    def __init__(self, slot_mapping: torch.Tensor, block_tokens: int) -> None:
        self.block = slot_mapping // block_tokens
        self.offset = slot_mapping % block_tokens
