"""The largest K and V of a layer over the calibration tokens: what static scales of the KV-cache are made of."""

from typing import Any

import torch
from torch import Tensor

from llmq.quantize.formats.scheme import KVCacheScheme

# Kind of the numbers -> the largest that they store.
_LARGEST = {"float": 448.0, "int": 127.0}


class KVRange:
    """Stands in for a transformers cache: attention hands it K, rotated, and V, as they would be cached."""

    def __init__(self) -> None:
        self.k_max = self.v_max = 0.0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.k_max = max(self.k_max, float(keys.abs().amax()))
        self.v_max = max(self.v_max, float(values.abs().amax()))
        return keys, values

    def scales(self, attention: str, scheme: KVCacheScheme, dtype: torch.dtype) -> dict[str, Tensor]:
        """`<attention>.k_scale` and `.v_scale`, [1]: the largest number met becomes the largest that is stored."""
        smallest = torch.finfo(dtype).tiny
        return {
            f"{attention}.{name}_scale": torch.tensor([largest / _LARGEST[scheme.kind]]).clamp(min=smallest).to(dtype)
            for name, largest in (("k", self.k_max), ("v", self.v_max))
        }
