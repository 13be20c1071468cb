"""AWQ's GEMM layout, as AutoAWQ and transformers store it: 4 bits, grouped, with zero points.

Of a linear with weight [out, in]:

    qweight  int32 [in, out / 8]      word j of a row holds u of outputs 8 j + (0, 2, 4, 6, 1, 3, 5, 7), low bits first
    qzeros   int32 [groups, out / 8]  zero points, in the same order
    scales   [groups, out]

    weight[o, i] = (u[o, i] - z[o, g]) * scale[o, g],  g = i // group_size
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmq.quantize.formats.base import GetTensor, Range, get_all, part_of
from llmq.quantize.formats.packing import pack_unsigned, unpack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import FormatError, KVCacheScheme, WeightScheme

QUANT_METHOD = "awq"
BITS = 4
# Which of eight neighbours each place of a word holds, and the inverse.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AWQFormat:
    """An AWQ folder's config. Which linears it quantized is said by the tensors that are there."""

    scheme: WeightScheme
    tensor_names_stored: Collection[str]
    kv_cache_scheme: KVCacheScheme | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any], tensor_names: Collection[str]) -> "AWQFormat":
        """Read the dict under `quantization_config`. Raises FormatError for what is not supported, by name."""
        version = str(config.get("version", "gemm")).lower()
        bits = config.get("bits", config.get("w_bit", BITS))
        group_size = config.get("group_size", config.get("q_group_size", 128))
        if version != "gemm" or bits != BITS or not config.get("zero_point", True):
            raise FormatError(
                f"AWQ version {version!r} with {bits} bits and zero_point {config.get('zero_point', True)} is not "
                "supported (gemm with 4 bits and zero points is)"
            )
        is_grouped = group_size > 0
        scheme = WeightScheme(
            "int", BITS, "group" if is_grouped else "channel", group_size if is_grouped else None, False
        )
        return cls(scheme, tensor_names)

    def scheme_for(self, module_name: str) -> WeightScheme | None:
        return self.scheme if f"{module_name}.qweight" in self.tensor_names_stored else None

    @staticmethod
    def tensor_names(module_name: str, scheme: WeightScheme) -> tuple[str, ...]:
        return tuple(f"{module_name}.{suffix}" for suffix in ("qweight", "qzeros", "scales"))

    def read(
        self, module_name: str, get_tensor: GetTensor, rows: Range | None = None, columns: Range | None = None
    ) -> QuantizedWeight:
        scheme = self.scheme_for(module_name)
        if scheme is None:
            raise FormatError(f"{module_name} is not quantized in this checkpoint")
        stored = get_all(module_name, self.tensor_names(module_name, scheme), scheme, get_tensor)
        qweight, scales = stored["qweight"], stored["scales"]
        in_features, out_features = qweight.shape[0], qweight.shape[1] * 8
        groups = scheme.num_groups(in_features)
        if tuple(scales.shape) != (groups, out_features) or tuple(stored["qzeros"].shape) != (
            groups,
            out_features // 8,
        ):
            raise FormatError(
                f"{module_name}: scales {list(scales.shape)} and qzeros {list(stored['qzeros'].shape)} are not those "
                f"of a [{out_features}, {in_features}] weight in {scheme.name}"
            )
        start, stop = rows or (0, out_features)
        first, last = columns or (0, in_features)
        if (first % (in_features // groups) or last % (in_features // groups)) and groups > 1:
            first, last = 0, in_features  # inside a group: refused below
        # Whole words that hold the rows, and whole groups: of a mapped file no other is read.
        words = slice(start // 8, -(-stop // 8))
        kept = slice(start % 8, start % 8 + stop - start)
        whole = slice(first * groups // in_features, last * groups // in_features) if groups > 1 else slice(0, 1)
        numbers = _unpack(qweight[first:last, words])[:, kept]
        zeros = _unpack(stored["qzeros"][whole, words])[:, kept]
        weight = QuantizedWeight(
            scheme=scheme,
            shape=(stop - start, last - first),
            values=pack_unsigned(numbers.T, BITS),
            scale=scales[whole, start:stop].T.contiguous(),
            zero_point=(zeros.T.to(torch.int8) - 8).contiguous(),
        )
        return part_of(weight, None, None if columns is None else (columns[0] - first, columns[1] - first))

    def may_ignore(self, tensor_name: str, get_tensor: GetTensor) -> bool:
        return False


class AWQWriter:
    """AWQ's GEMM layout: read by vLLM, SGLang, AutoAWQ and transformers."""

    name = QUANT_METHOD

    def check(self, scheme: WeightScheme, shape: tuple[int, int] | None = None) -> None:
        is_storable = scheme.kind == "int" and scheme.bits == BITS and scheme.strategy in ("group", "channel")
        if not is_storable or scheme.symmetric or scheme.has_offset or scheme.has_column_groups or scheme.activation:
            raise FormatError(
                f"the AWQ layout stores 4-bit integers with zero points alone (--bits 4 --asym), not {scheme.name}"
            )
        if shape is not None and (shape[0] % 8 or shape[1] % (scheme.group_size or shape[1])):
            raise FormatError(
                f"the AWQ layout stores weights whose outputs are a multiple of 8 and whose inputs are one of the "
                f"group size, not {list(shape)} in {scheme.name}"
            )

    def tensors(self, module_name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        self.check(weight.scheme, weight.shape)
        numbers = unpack_unsigned(weight.values, BITS, weight.in_features)
        # float16 is what AWQ's kernels read; a scale that it cannot hold would become inf or 0.
        scale = weight.scale.to(torch.float16)
        if not bool(torch.isfinite(scale).all()) or bool(((scale == 0) & (weight.scale != 0)).any()):
            raise FormatError(f"{module_name} has a scale outside float16, which is what the AWQ layout stores")
        return {
            f"{module_name}.qweight": _pack(numbers.T),
            f"{module_name}.qzeros": _pack(weight.zero_point.T.to(torch.int16) + 8),
            f"{module_name}.scales": scale.T.contiguous(),
        }

    def config(
        self,
        schemes: Mapping[str, WeightScheme],
        left_alone: Sequence[str],
        kv_cache_scheme: KVCacheScheme | None = None,
    ) -> dict[str, Any]:
        if kv_cache_scheme is not None:
            raise FormatError("the AWQ layout has no place for scales of the KV-cache: --format compressed-tensors")
        if len(set(schemes.values())) > 1:
            raise FormatError("the AWQ layout has one group size for all linears: --format compressed-tensors has more")
        scheme = next(iter(schemes.values()))
        self.check(scheme)
        # vLLM and transformers take a name as part of a module's name; the head is never converted.
        others = sorted(name for name in left_alone if name != "lm_head")
        return {
            "quant_method": QUANT_METHOD,
            "version": "gemm",
            "bits": BITS,
            "group_size": scheme.group_size or -1,
            "zero_point": True,
            "modules_to_not_convert": others or None,
        }


def _unpack(packed: Tensor) -> Tensor:
    """int32 [rows, words] in AWQ's order -> uint8 [rows, 8 * words]"""
    numbers = unpack_unsigned(packed, BITS, packed.shape[1] * 8)
    return numbers.view(packed.shape[0], -1, 8)[:, :, list(_PLACES)].reshape(packed.shape[0], -1)


def _pack(numbers: Tensor) -> Tensor:
    """Numbers [rows, n] -> int32 [rows, n / 8] in AWQ's order"""
    shuffled = numbers.reshape(numbers.shape[0], -1, 8)[:, :, list(_ORDER)]
    return pack_unsigned(shuffled.reshape(numbers.shape[0], -1), BITS)
