"""GPTQ's layout, as AutoGPTQ, GPTQModel and transformers store it, in both of its conventions for zero points.

Of a linear with weight [out, in]:

    qweight  int32 [in * bits / 32, out]      a stream of u = q + 2**(bits-1) down each column (3 bits go across words)
    qzeros   int32 [groups, out * bits / 32]  a stream along each row: z - 1 ("gptq", v1) or z ("gptq_v2")
    scales   [groups, out]
    g_idx    int32 [in]                       the group of each input channel, out of order for activation order

    weight[o, i] = (u[o, i] - z[o, g_idx[i]]) * scale[o, g_idx[i]]

v1's z - 1 cannot say a zero point of 0: libraries that met one wrote the word's other zero points wrong with it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from llmq.quantize.formats.base import GetTensor, Range, get_all, part_of
from llmq.quantize.formats.column_order import column_order, group_index, sorted_columns, stored_values
from llmq.quantize.formats.packing import pack_unsigned, unpack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import FormatError, KVCacheScheme, WeightScheme

QUANT_METHOD = "gptq"
BITS = (2, 3, 4, 8)
# checkpoint_format -> what is subtracted from a zero point before it is stored
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class GPTQFormat:
    """A GPTQ folder's config. Which linears it quantized is said by the tensors that are there."""

    scheme: WeightScheme
    zero_offset: int
    tensor_names_stored: Collection[str]
    # Patterns of module names -> what is otherwise for them; None: left in 16 bit (GPTQModel's `dynamic`).
    overrides: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    kv_cache_scheme: KVCacheScheme | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any], tensor_names: Collection[str]) -> "GPTQFormat":
        """Read the dict under `quantization_config`, or quantize_config.json. Raises FormatError."""
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if config.get("is_marlin_format"):
            layout = "marlin"
        if layout not in _ZERO_OFFSETS:
            raise FormatError(f"GPTQ checkpoint_format {layout!r} is not supported ({', '.join(_ZERO_OFFSETS)} are)")
        overrides = {
            pattern.removeprefix("+:").removeprefix("-:"): None if pattern.startswith("-:") else changes
            for pattern, changes in (config.get("dynamic") or {}).items()
        }
        return cls(_scheme(config), _ZERO_OFFSETS[layout], tensor_names, overrides)

    def scheme_for(self, module_name: str) -> WeightScheme | None:
        if f"{module_name}.qweight" not in self.tensor_names_stored:
            return None
        changes = next((c for pattern, c in self.overrides.items() if re.match(pattern, module_name)), {})
        if changes is None:
            raise FormatError(f"{module_name} is stored quantized, and `dynamic` of its config leaves it out")
        own = {"bits": self.scheme.bits, "group_size": self.scheme.group_size, "sym": self.scheme.symmetric}
        return _scheme({**own, "desc_act": self.scheme.has_column_groups, **changes}) if changes else self.scheme

    def tensor_names(self, module_name: str, scheme: WeightScheme) -> tuple[str, ...]:
        names = [f"{module_name}.{suffix}" for suffix in ("qweight", "qzeros", "scales")]
        g_idx = f"{module_name}.g_idx"  # older writers leave it out where it says nothing
        return (*names, g_idx) if scheme.has_column_groups or g_idx in self.tensor_names_stored else tuple(names)

    def read(
        self, module_name: str, get_tensor: GetTensor, rows: Range | None = None, columns: Range | None = None
    ) -> QuantizedWeight:
        scheme = self.scheme_for(module_name)
        if scheme is None:
            raise FormatError(f"{module_name} is not quantized in this checkpoint")
        stored = get_all(module_name, self.tensor_names(module_name, scheme), scheme, get_tensor)
        return _assemble(module_name, scheme, stored, self.zero_offset, rows, columns)

    def may_ignore(self, tensor_name: str, get_tensor: GetTensor) -> bool:
        """AutoGPTQ stores a bias of zeros for each linear that has none."""
        module_name, _, kind = tensor_name.rpartition(".")
        is_of_quantized = kind == "bias" and f"{module_name}.qweight" in self.tensor_names_stored
        return is_of_quantized and not bool(get_tensor(tensor_name).any())


def _scheme(config: Mapping[str, Any]) -> WeightScheme:
    bits, group_size = config.get("bits"), config.get("group_size", -1)
    if bits not in BITS:
        raise FormatError(f"{bits}-bit GPTQ weights are not supported ({', '.join(map(str, BITS))} are)")
    is_grouped = group_size is not None and group_size > 0
    return WeightScheme(
        kind="int",
        bits=bits,
        strategy="group" if is_grouped else "channel",
        group_size=group_size if is_grouped else None,
        symmetric=config.get("sym", True),
        has_column_groups=bool(config.get("desc_act")) and is_grouped,
    )


def _assemble(
    module_name: str,
    scheme: WeightScheme,
    stored: Mapping[str, Tensor],
    zero_offset: int,
    rows: Range | None,
    columns: Range | None,
) -> QuantizedWeight:
    bits, qweight, scales, qzeros = scheme.bits, stored["qweight"], stored["scales"], stored["qzeros"]
    in_features, out_features = qweight.shape[0] * 32 // bits, qweight.shape[1]
    groups = scheme.num_groups(in_features)
    expected = (groups, out_features), (groups, -(-out_features * bits // 32))
    if (tuple(scales.shape), tuple(qzeros.shape)) != expected:
        raise FormatError(
            f"{module_name}: scales {list(scales.shape)} and qzeros {list(qzeros.shape)} are not those of a "
            f"[{out_features}, {in_features}] weight in {scheme.name}, {[list(shape) for shape in expected]}"
        )
    zeros = unpack_unsigned(qzeros, bits, out_features)
    zeros = (zeros.to(torch.int16) + zero_offset) % (1 << bits)
    start, stop = rows or (0, out_features)
    values = qweight[:, start:stop].T  # a view: of a mapped file nothing is read yet
    order = column_groups = None
    if stored.get("g_idx") is not None and groups > 1:
        order = column_order(module_name, scheme, in_features, stored["g_idx"])
    is_ordered, per_word = order is not None, 32 // _gcd(bits)
    if is_ordered and columns is not None and not (columns[0] % per_word or columns[1] % per_word):
        (first, last), columns = columns, None
        numbers = unpack_unsigned(values[:, first * bits // 32 : last * bits // 32], bits, last - first)
        column_groups = stored["g_idx"][first:last].to(torch.int64)
    elif is_ordered:
        values = sorted_columns(values, bits, order)
    zero_point = (zeros[:, start:stop].T - (1 << (bits - 1))).to(torch.int8)
    if scheme.symmetric and bool(zero_point.any()):
        raise FormatError(
            f"{module_name}: the config says symmetric, and zero points are not {1 << (bits - 1)}: is it of the other "
            f"checkpoint_format ({' or '.join(_ZERO_OFFSETS)})?"
        )
    weight = QuantizedWeight(
        scheme=replace(scheme, has_column_groups=is_ordered),
        shape=(stop - start, in_features),
        values=values,
        scale=scales[:, start:stop].T,
        zero_point=None if scheme.symmetric else zero_point,
        column_order=order,
    )
    if column_groups is not None:
        return weight.in_runs(numbers, column_groups).contiguous()
    return part_of(weight, None, columns).contiguous()


class GPTQWriter:
    """GPTQ's layout: read by vLLM, SGLang, GPTQModel and transformers (through GPTQModel)."""

    def __init__(self, name: str) -> None:
        self.name = name  # "gptq" or "gptq_v2"

    def check(self, scheme: WeightScheme, shape: tuple[int, int] | None = None) -> None:
        if scheme.kind != "int" or scheme.bits not in BITS or scheme.has_offset or scheme.activation is not None:
            raise FormatError(
                f"the GPTQ layout stores integer weights of {', '.join(map(str, BITS))} bits alone, not {scheme.name}"
            )
        if scheme.strategy not in ("group", "channel"):
            raise FormatError(f"the GPTQ layout stores a scale a group or a row, not {scheme.name}")
        if not scheme.symmetric and _ZERO_OFFSETS[self.name]:
            raise FormatError(
                f"--format gptq stores zero points less one and so has none for 0: {scheme.name} goes into "
                "--format gptq_v2, or --sym"
            )
        if shape is not None:
            out, width = shape
            group = scheme.group_size or width
            if width % group or width * scheme.bits % 32 or out * scheme.bits % 32:
                raise FormatError(
                    f"a [{out}, {width}] weight in {scheme.name} does not fill whole words and groups of the GPTQ "
                    f"layout: both sides must be multiples of {32 // _gcd(scheme.bits)}, the inputs of {group}"
                )

    def tensors(self, module_name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        self.check(weight.scheme, weight.shape)
        return to_tensors(module_name, weight, _ZERO_OFFSETS[self.name])

    def config(
        self,
        schemes: Mapping[str, WeightScheme],
        left_alone: Sequence[str],
        kv_cache_scheme: KVCacheScheme | None = None,
    ) -> dict[str, Any]:
        if kv_cache_scheme is not None:
            raise FormatError("the GPTQ layout has no place for scales of the KV-cache: --format compressed-tensors")
        counts: dict[WeightScheme, int] = {}
        for scheme in schemes.values():
            self.check(scheme)
            counts[scheme] = counts.get(scheme, 0) + 1
        usual = max(counts, key=counts.__getitem__)
        config = {
            "quant_method": QUANT_METHOD,
            "checkpoint_format": self.name,
            "bits": usual.bits,
            "group_size": usual.group_size or -1,
            "sym": usual.symmetric,
            "desc_act": any(scheme.has_column_groups for scheme in counts),
            "static_groups": False,
            "true_sequential": True,
            "lm_head": "lm_head" in schemes,
            "quantizer": "llmq",
        }
        # GPTQModel's words for what is otherwise, which vLLM and SGLang read too: a regular expression a module.
        dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in sorted(left_alone) if name != "lm_head"}
        for name, scheme in schemes.items():
            if scheme != usual:
                dynamic[f"+:^{re.escape(name)}$"] = {
                    "bits": scheme.bits,
                    "group_size": scheme.group_size or -1,
                    "sym": scheme.symmetric,
                    "desc_act": scheme.has_column_groups,
                }
        return {**config, "dynamic": dynamic} if dynamic else config


def to_tensors(module_name: str, weight: QuantizedWeight, zero_offset: int) -> dict[str, Tensor]:
    """The four tensors of one linear. Raises FormatError for a zero point that `z - zero_offset` cannot say."""
    bits, half = weight.scheme.bits, 1 << (weight.scheme.bits - 1)
    scale = weight.scale.expand(weight.out_features, -1)
    zeros = torch.full_like(scale, half, dtype=torch.int16)
    if weight.zero_point is not None:
        zeros = weight.zero_point.to(torch.int16) + half
    if bool((zeros < zero_offset).any()):
        raise FormatError(f"{module_name} has a zero point of 0, which the v1 GPTQ layout cannot store: gptq_v2 can")
    return {
        f"{module_name}.qweight": stored_values(weight).T.contiguous(),
        f"{module_name}.qzeros": pack_unsigned((zeros - zero_offset).T, bits),
        f"{module_name}.scales": scale.T.contiguous(),
        f"{module_name}.g_idx": group_index(weight),
    }


def _gcd(bits: int) -> int:
    """What `bits` and 32 have in common."""
    return bits & -bits
