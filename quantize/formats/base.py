"""What a checkpoint format is to its users: something that reads each linear as a QuantizedWeight, or writes one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import KVCacheScheme, WeightScheme


class FormatWriter(Protocol):
    """One layout on disk, written. Raises FormatError, by name, for what it cannot store."""

    name: str  # as in `--format`

    def check(self, scheme: WeightScheme, shape: tuple[int, int] | None = None) -> None:
        """Raise FormatError unless linears of this scheme, and of this [out, in] shape, can be stored."""
        ...

    def tensors(self, module_name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors to store for one linear, its bias aside, under their full names."""
        ...

    def config(
        self,
        schemes: Mapping[str, WeightScheme],
        left_alone: Sequence[str],
        kv_cache_scheme: KVCacheScheme | None = None,
    ) -> dict[str, Any]:
        """The dict to store under `quantization_config`.

        schemes: of each quantized linear by its full name. left_alone: the linears that stay in 16 bit, a tied head
        among them, by full name. Raises FormatError where the layout cannot say it (two group sizes in one AWQ folder).
        """
        ...
