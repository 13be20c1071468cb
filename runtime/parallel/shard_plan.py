"""What each rank of a tensor-parallel engine holds of each parameter, as data. No torch: asked before a start.

Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053, section 3): the linears that read the residual stream are split by
their output features (colwise), those that write to it by their input features (rowwise), so that attention's heads and
the MLP's features stay on one rank and a layer needs one sum over ranks behind each of the two.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError
from llmq.profiles.families import DecoderFamily
from llmq.profiles.weight_storage import WeightStorage, declared_storage
from llmq.quantize.formats.compressed_tensors_config import read_group, scheme_of
from llmq.quantize.formats.scheme import FormatError, WeightScheme

Range = tuple[int, int]  # start, stop
NONE_QUANTIZED: Mapping[str, WeightScheme] = {}


@dataclass(frozen=True)
class Shard:
    """A rank's part of a module: its output features, one range after the other, and its input features; None: all."""

    way: Literal["replicated", "colwise", "rowwise", "vocabulary"] = "replicated"
    rows: tuple[Range, ...] | None = None
    columns: Range | None = None
    has_bias: bool = True  # of a sum over ranks the bias is a part once: rank 0's


REPLICATED = Shard()


@dataclass(frozen=True)
class ShardPlan:
    """Rank `rank` of `num_ranks` that share a decoder of `family`.

    Experts are split like an MLP, each on its intermediate size: all ranks compute the same routing and have the same
    work, however the tokens fall. A KV head that there are too few of is held by several ranks.
    """

    architecture: ModelArchitecture
    family: DecoderFamily
    config: Mapping[str, Any]
    num_ranks: int = 1
    rank: int = 0

    @property
    def num_heads(self) -> int:
        """Of queries, on this rank."""
        return self.architecture.num_attention_heads // self.num_ranks

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.architecture.num_kv_heads // self.num_ranks)

    @property
    def kv_copies(self) -> int:
        """Ranks that hold the same KV head."""
        return max(1, self.num_ranks // self.architecture.num_kv_heads)

    @property
    def vocabulary(self) -> Range:
        """Words whose rows of embedding and head are here; ranks differ by at most one word."""
        return self._share(self.architecture.vocab_size)

    @property
    def vocabularies(self) -> list[Range]:
        """Of all ranks."""
        return [replace(self, rank=rank).vocabulary for rank in range(self.num_ranks)]

    def shard(self, module_name: str) -> Shard:
        """Of a module by its name in the checkpoint."""
        if self.num_ranks == 1:
            return REPLICATED
        return self._table.get(kind_of(module_name), REPLICATED)

    @property
    def split_inputs(self) -> dict[str, int]:
        """Input features, of all ranks together, of the kinds of modules that are split by them."""
        heads, layer = self.architecture.num_attention_heads, self.architecture.keys[0]
        mlps = {f"layer.{out}": width for width, _, out in _mlps(self.architecture, self.family, self.config)}
        return {f"layer.{self.family.o}": heads * layer.head_dim_v, **mlps}

    @cached_property
    def _table(self) -> dict[str, Shard]:
        """Kinds of modules (`kind_of`) that are split."""
        family, layer, kv_heads = self.family, self.architecture.keys[0], self.architecture.num_kv_heads
        vocabulary = Shard("vocabulary", rows=(self.vocabulary,))
        heads = self._share(self.architecture.num_attention_heads)
        first = self.rank * kv_heads // self.num_ranks
        kv = (first, first + self.num_kv_heads)
        parts = [_times(heads, layer.head_dim_k), _times(kv, layer.head_dim_k), _times(kv, layer.head_dim_v)]
        whole = [self.architecture.num_attention_heads * layer.head_dim_k]
        whole += [kv_heads * layer.head_dim_k, kv_heads * layer.head_dim_v]
        table = {"model.embed_tokens": vocabulary, "lm_head": vocabulary, **_colwise(family.qkv, parts, whole)}
        if family.qk_norm == "projection":
            table |= _colwise(("self_attn.q_norm", "self_attn.k_norm"), parts[:2], whole[:2])
        table[f"layer.{family.o}"] = self._rowwise(_times(heads, layer.head_dim_v))
        for width, wide, out in _mlps(self.architecture, family, self.config):
            siblings = 1 + family.gated
            table |= _colwise(wide, [self._share(width)] * siblings, [width] * siblings)
            table[f"layer.{out}"] = self._rowwise(self._share(width))
        return table

    def _share(self, total: int) -> Range:
        return total * self.rank // self.num_ranks, total * (self.rank + 1) // self.num_ranks

    def _rowwise(self, columns: Range) -> Shard:
        return Shard("rowwise", columns=columns, has_bias=self.rank == 0)


def valid_ranks(
    architecture: ModelArchitecture, config: Mapping[str, Any], schemes: Mapping[str, WeightScheme] = NONE_QUANTIZED
) -> list[int]:
    """Numbers of ranks that a decoder of llmq's own can be split into: by its heads, by the widths of its MLPs, and by
    what of its quantized modules (`schemes`, by their names) belongs together."""
    config = _text_config(config)
    inputs = ShardPlan(architecture, architecture.family, config).split_inputs
    steps = _column_steps(inputs, schemes)
    return [
        n
        for n in _valid_by_shape(architecture, config)
        if n == 1 or not any(width // n % steps[kind] for kind, width in inputs.items())
    ]


def declared_schemes(
    architecture: ModelArchitecture, config: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> Mapping[str, WeightScheme]:
    """What config.json alone says of the modules that are split by their inputs, by names that stand for them.

    Of GGUF's blocks and GPTQ's rules for single modules only the tensors tell: a start that has read their headers
    refuses those.
    """
    if not quantization or architecture.family is None:
        return NONE_QUANTIZED
    if quantization.get("quant_method") == "compressed-tensors":
        return _compressed_schemes(architecture, config, quantization)
    storage = declared_storage(dict(quantization))
    if storage is None:
        return NONE_QUANTIZED
    return stored_schemes(architecture, config, storage, in_order=not quantization.get("desc_act"))


def stored_schemes(
    architecture: ModelArchitecture, config: Mapping[str, Any], storage: WeightStorage, in_order: bool = True
) -> Mapping[str, WeightScheme]:
    """`declared_schemes` of a model whose linears are all stored alike."""
    if architecture.family is None or storage.bits >= 16:
        return NONE_QUANTIZED
    scheme = WeightScheme(
        "int",
        storage.bits,
        "group" if storage.group_size else "channel",
        storage.group_size,
        layout="pack-quantized" if storage.bits < 8 else "int-quantized",
        has_column_groups=not in_order,
    )
    return dict.fromkeys(_split_modules(architecture, config, 1), scheme)


def _compressed_schemes(
    architecture: ModelArchitecture, config: Mapping[str, Any], quantization: Mapping[str, Any]
) -> Mapping[str, WeightScheme]:
    try:
        groups = [
            read_group(name, group, quantization.get("format"))
            for name, group in (quantization.get("config_groups") or {}).items()
        ]
    except FormatError:  # which a start, or what quantizes, refuses by name
        return NONE_QUANTIZED
    names = _split_modules(architecture, config, architecture.num_layers)
    found = {name: scheme_of(groups, quantization.get("ignore") or (), name) for name in names}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def _split_modules(architecture: ModelArchitecture, config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Names of modules that are split by their inputs, of the first layers, and of the first expert."""
    kinds = ShardPlan(architecture, architecture.family, _text_config(config)).split_inputs
    names = [kind.removeprefix("layer.").replace(".*.", ".0.") for kind in kinds]
    return [f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in names]


def names_widths(architecture: ModelArchitecture, config: Mapping[str, Any]) -> bool:
    """Whether config.json says all that decides into how many ranks a decoder of llmq's own can be split."""
    try:
        return architecture.family is not None and bool(_mlps(architecture, architecture.family, _text_config(config)))
    except InputError:
        return False


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}


def check_ranks(
    architecture: ModelArchitecture,
    config: Mapping[str, Any],
    num_ranks: int,
    schemes: Mapping[str, WeightScheme] = NONE_QUANTIZED,
) -> None:
    """Raises InputError, with the numbers that work, for ranks that a model cannot be split into (`valid_ranks`)."""
    if num_ranks == 1:
        return
    config, family = _text_config(config), architecture.family
    if family is None:
        raise InputError(
            f"--tp {num_ranks}: model_type {architecture.model_type!r} runs by transformers' own code, which llmq does "
            "not split over ranks; leave --tp away"
        )
    valid = valid_ranks(architecture, config, schemes)
    if num_ranks in valid:
        return
    works = f"valid: {', '.join(map(str, valid))}"
    if num_ranks not in _valid_by_shape(architecture, config):
        widths = sorted({width for width, _, _ in _mlps(architecture, family, config)})
        raise InputError(
            f"--tp {num_ranks} does not split {architecture.num_attention_heads} heads, {architecture.num_kv_heads} KV "
            f"heads and an MLP of {' and '.join(map(str, widths))} features evenly; {works}"
        )
    inputs = ShardPlan(architecture, family, config).split_inputs
    steps = _column_steps(inputs, schemes)
    kind = next(kind for kind, width in inputs.items() if width // num_ranks % steps[kind])
    raise InputError(
        f"--tp {num_ranks}: a rank would take {inputs[kind] // num_ranks} of the {inputs[kind]} input features of "
        f"{kind.removeprefix('layer.')}, and {steps[kind]} of them belong together; {works}"
    )


def _valid_by_shape(architecture: ModelArchitecture, config: Mapping[str, Any]) -> list[int]:
    widths = [width for width, _, _ in _mlps(architecture, architecture.family, config)]
    return [n for n in architecture.valid_tensor_parallel if not any(width % n for width in widths)]


def _column_steps(inputs: Mapping[str, int], schemes: Mapping[str, WeightScheme]) -> dict[str, int]:
    """Of each kind of module that is split by its inputs, how many of them share a scale or a word."""
    steps = dict.fromkeys(inputs, 1)
    for module_name, scheme in schemes.items():
        kind = kind_of(module_name)
        if kind in steps and not scheme.has_column_groups:  # in activation order each column has its group beside it
            steps[kind] = math.lcm(steps[kind], scheme.column_step(inputs[kind]))
    return steps


def _times(heads: Range, size: int) -> Range:
    return heads[0] * size, heads[1] * size


def _colwise(names: tuple[str, ...], parts: list[Range], whole: list[int]) -> dict[str, Shard]:
    """`parts` of siblings of `whole` rows each; under one name they are stored one after the other."""
    if len(names) > 1:
        return {f"layer.{name}": Shard("colwise", (part,)) for name, part in zip(names, parts, strict=True)}
    starts = [sum(whole[:index]) for index in range(len(whole))]
    rows = tuple((start + first, start + last) for start, (first, last) in zip(starts, parts, strict=True))
    return {f"layer.{names[0]}": Shard("colwise", rows)}


def kind_of(module_name: str) -> str:
    """`model.layers.3.mlp.experts.5.up_proj` -> `layer.mlp.experts.*.up_proj`"""
    return re.sub(r"\.\d+\.", ".*.", re.sub(r"^model\.layers\.\d+\.", "layer.", module_name))


def _mlps(
    architecture: ModelArchitecture, family: DecoderFamily, config: Mapping[str, Any]
) -> list[tuple[int, tuple[str, ...], str]]:
    """Width, first linears and last linear of each kind of MLP that a decoder has."""
    experts, mlps = family.experts, []
    layers = range(architecture.num_layers)
    if experts is not None and any(experts.has_layer(layer, config) for layer in layers):
        names = f"{experts.experts}.*"
        wide = (f"{names}.{experts.gate}", f"{names}.{experts.up}")
        width = experts.intermediate_size.of(config)
        if not isinstance(width, int):
            raise InputError("config.json: the intermediate size of its experts is missing or not a whole number")
        mlps.append((width, wide, f"{names}.{experts.down}"))
    if experts is None or not all(experts.has_layer(layer, config) for layer in layers):
        if architecture.intermediate_size is None:
            raise InputError("config.json: intermediate_size is missing or not a whole number")
        mlps.append((architecture.intermediate_size, family.mlp_in, family.mlp_out))
    return mlps
