"""What a checkpoint format is to its users: something that reads each linear as a QuantizedWeight, or writes one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import FormatError, KVCacheScheme, WeightScheme

GetTensor = Callable[[str], Tensor]  # raises KeyError for a tensor that is not there; memory-mapped, where it can be
Range = tuple[int, int]  # start, stop


class CheckpointFormat(Protocol):
    """A folder's quantization, understood. Raises FormatError, by name, for what it cannot honour in full."""

    kv_cache_scheme: KVCacheScheme | None

    def scheme_for(self, module_name: str) -> WeightScheme | None:
        """The scheme of a linear by its name in the checkpoint; None if it is left in 16 bit."""
        ...

    def tensor_names(self, module_name: str, scheme: WeightScheme) -> tuple[str, ...]:
        """The tensors that make one linear's weight (a bias, if any, is apart)."""
        ...

    def read(
        self, module_name: str, get_tensor: GetTensor, rows: Range | None = None, columns: Range | None = None
    ) -> QuantizedWeight:
        """One linear, packed; or of it, for a tensor-parallel rank, output features `rows` and input features
        `columns`, in which case nothing else of a memory-mapped file is read."""
        ...

    def may_ignore(self, tensor_name: str, get_tensor: GetTensor) -> bool:
        """Whether a tensor that nothing asked for changes nothing: what a writer stores of a default."""
        ...


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


def get_all(module_name: str, names: Sequence[str], scheme: WeightScheme, get_tensor: GetTensor) -> dict[str, Tensor]:
    """The tensors `names` by the last part of each name. Raises FormatError for one that is not there."""
    stored = {}
    for name in names:
        try:
            stored[name.removeprefix(f"{module_name}.")] = get_tensor(name)
        except KeyError:
            raise FormatError(f"the checkpoint lacks {name}, which its scheme ({scheme.name}) needs") from None
    return stored


def part_of(weight: QuantizedWeight, rows: Range | None, columns: Range | None) -> QuantizedWeight:
    """`weight`, or the rows and columns asked for."""
    if rows is not None:
        weight = weight.slice_rows(*rows)
    return weight if columns is None else weight.slice_columns(*columns)
