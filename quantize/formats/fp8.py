"""quant_method "fp8": e4m3 weights with one scale for each block of 128 × 128 (DeepSeek-V3, Qwen3, transformers'
FineGrainedFP8), or with one for the tensor (AutoFP8).

    weight             e4m3 [out, in]
    weight_scale_inv   [ceil(out / 128), ceil(in / 128)], what the block is multiplied by (the quantizer's inverse)
    weight_scale       [] or [1], of AutoFP8; input_scale, if activation_scheme is "static"

Activations are rounded to e4m3, by blocks: 128 channels of a token a scale (DeepSeek-V3, section 3.3.2).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmq.quantize.formats.base import GetTensor, Range, get_all, part_of
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import ActivationScheme, FormatError, KVCacheScheme, WeightScheme

QUANT_METHOD = "fp8"


@dataclass(frozen=True)
class FP8Format:
    """An FP8 folder's config. Which linears it quantized is said by the scales that are there."""

    scheme: WeightScheme
    tensor_names_stored: Collection[str]
    kv_cache_scheme: KVCacheScheme | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any], tensor_names: Collection[str]) -> "FP8Format":
        """Read the dict under `quantization_config`. Raises FormatError for what is not supported, by name."""
        number, scale_format = config.get("fmt", "e4m3"), config.get("scale_fmt") or "float"
        if number not in ("e4m3", "float8_e4m3fn"):
            raise FormatError(f"FP8 weights of fmt {number!r} are not supported (e4m3 are)")
        if scale_format != "float":
            raise FormatError(f"FP8 weights with scale_fmt {scale_format!r} are not supported (float is)")
        activations, block = config.get("activation_scheme", "dynamic"), config.get("weight_block_size")
        if activations not in ("dynamic", "static") or (block and activations == "static"):
            where = " with weight_block_size" if block else ""
            raise FormatError(f"FP8 activation_scheme {activations!r}{where} is not supported")
        if not block:
            activation = ActivationScheme("float", dynamic=activations == "dynamic")
            scheme = WeightScheme("float", 8, "tensor", activation=activation, layout="float-quantized")
        else:
            scheme = block_scheme(*block)
        return cls(scheme, tensor_names)

    @property
    def _scale_name(self) -> str:
        return "weight_scale_inv" if self.scheme.strategy == "block" else "weight_scale"

    def scheme_for(self, module_name: str) -> WeightScheme | None:
        return self.scheme if f"{module_name}.{self._scale_name}" in self.tensor_names_stored else None

    def tensor_names(self, module_name: str, scheme: WeightScheme) -> tuple[str, ...]:
        suffixes = ["weight", self._scale_name]
        if not scheme.activation.dynamic:
            suffixes.append("input_scale")
        return tuple(f"{module_name}.{suffix}" for suffix in suffixes)

    def read(
        self, module_name: str, get_tensor: GetTensor, rows: Range | None = None, columns: Range | None = None
    ) -> QuantizedWeight:
        scheme = self.scheme_for(module_name)
        if scheme is None:
            raise FormatError(f"{module_name} is not quantized in this checkpoint")
        stored = get_all(module_name, self.tensor_names(module_name, scheme), scheme, get_tensor)
        weight, scale = stored["weight"], stored[self._scale_name]
        shape = tuple(weight.shape)
        expected = scheme.scale_shape(shape)
        if weight.dtype != torch.float8_e4m3fn or scale.numel() != expected[0] * expected[1]:
            raise FormatError(
                f"{module_name}: a {weight.dtype} weight {list(shape)} with {self._scale_name} {list(scale.shape)} is "
                f"not {scheme.name}, whose scales are {list(expected)}"
            )
        input_scale = stored.get("input_scale")
        quantized = QuantizedWeight(
            scheme=scheme,
            shape=shape,
            values=weight,
            scale=scale.view(expected),
            input_scale=None if input_scale is None else input_scale.to(torch.float32).view(()),
        )
        return part_of(quantized, rows, columns)

    def may_ignore(self, tensor_name: str, get_tensor: GetTensor) -> bool:
        return False


def block_scheme(block_rows: int = 128, block_columns: int = 128) -> WeightScheme:
    """Fine-grained FP8 as DeepSeek-V3 has it."""
    return WeightScheme(
        kind="float",
        bits=8,
        strategy="block",
        group_size=block_columns,
        activation=ActivationScheme("float", group_size=block_columns),
        layout="float-quantized",
        block_rows=block_rows,
    )


class FP8Writer:
    """128 × 128 blocks: read by transformers (FineGrainedFP8), vLLM and SGLang."""

    name = QUANT_METHOD

    def check(self, scheme: WeightScheme, shape: tuple[int, int] | None = None) -> None:
        if scheme != block_scheme(scheme.block_rows or 128, scheme.group_size or 128):
            raise FormatError(
                f"--format fp8 stores e4m3 weights in blocks with dynamic activations ({block_scheme().name}), not "
                f"{scheme.name}: --format compressed-tensors does"
            )

    def tensors(self, module_name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        self.check(weight.scheme)
        return {
            f"{module_name}.weight": weight.values.contiguous(),
            f"{module_name}.weight_scale_inv": weight.scale.float().contiguous(),
        }

    def config(
        self,
        schemes: Mapping[str, WeightScheme],
        left_alone: Sequence[str],
        kv_cache_scheme: KVCacheScheme | None = None,
    ) -> dict[str, Any]:
        if kv_cache_scheme is not None:
            raise FormatError("--format fp8 has no place for scales of the KV-cache: --format compressed-tensors")
        if len(set(schemes.values())) > 1:
            raise FormatError("--format fp8 has one block size for all linears")
        scheme = next(iter(schemes.values()))
        self.check(scheme)
        return {
            "quant_method": QUANT_METHOD,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [scheme.block_rows, scheme.group_size],
            "modules_to_not_convert": sorted({*left_alone, "lm_head"} - set(schemes)),
        }
