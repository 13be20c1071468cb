"""A Decoder -> operations of `runtime/kernels/native/program.h`. What a family is like stays in the decoder's data."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmq.runtime.attention.native import native_planes
from llmq.runtime.kernels import native
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.linear import Linear, SplitLinear
from llmq.runtime.layers.mlp import ACTIVATIONS, MLP, Experts
from llmq.runtime.layers.native_linear import NativeLinear
from llmq.runtime.layers.norm import LayerNorm, Norm
from llmq.runtime.layers.self_attention import SelfAttention
from llmq.runtime.models.decoder import Decoder

# transformers' names for activation functions -> ours
_FUNCTIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class NotLoweredError(Exception):
    """Why a decoder has no native program, for people."""


@dataclass(frozen=True)
class Lowered:
    program: "native.Program"
    result: int  # the buffer of hidden states after the final norm
    hidden_size: int
    tensors: list[Tensor]  # that the program points into, beside those of the decoder and the store


def lower(decoder: Decoder, store: KVStore) -> Lowered:
    """The operations of a decoder in bfloat16 whose linears are native. Raises NotLoweredError for what is not."""
    if native is None:
        raise NotLoweredError("the native kernels are not there")
    if not decoder.is_whole:
        raise NotLoweredError("it is a stage of several")
    if (dtype := decoder.embedding.dtype) != torch.bfloat16:
        raise NotLoweredError(f"activations are {str(dtype).removeprefix('torch.')}, not bfloat16")
    if decoder.vocabulary is not None:
        raise NotLoweredError("ranks share it, and sum by torch")
    return _Lowering(decoder, store).run()


@dataclass
class _Lowering:
    decoder: Decoder
    store: KVStore
    program: Any = field(default_factory=lambda: native.Program())
    buffers: dict[tuple[str, int], int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def run(self) -> Lowered:
        decoder, size = self.decoder, self.decoder.embedding.shape[1]
        self.planes = native_planes(self.store)
        self.group_of_layer = {
            layer: index for index, group in enumerate(self.store.layout.groups) for layer in group.layers
        }
        x, y, normed = (self._buffer(name, size) for name in ("residual", "part", "normed"))
        self.program.add_embed(decoder.embedding.data_ptr(), size, decoder.embedding_scale or 1.0, x)
        befores = [*(block.before for block in decoder.blocks), decoder.final_norm]
        if befores[0] is not None:
            self.program.add_residual(size, native.Norm(), 1.0, self._norm(befores[0], size), x, -1, normed)
        for block, before, following in zip(decoder.blocks, befores[:-1], befores[1:], strict=True):
            self._part(block.part, x if before is None else normed, y)
            after, scale = self._norm(block.after, size), 1.0 if block.scale is None else block.scale
            out = -1 if following is None else normed
            self.program.add_residual(size, after, scale, self._norm(following, size), x, y, out)
        return Lowered(self.program, normed, size, self.tensors)

    def _part(self, part: Any, source: int, out: int) -> None:
        if isinstance(part, SelfAttention):
            self._attention(part, source, out)
        elif isinstance(part, MLP):
            self._mlp(part, source, out)
        elif isinstance(part, Experts):
            self._experts(part, source, out)
        else:
            raise NotLoweredError(f"no native operation for {type(part).__name__}")

    def _attention(self, part: SelfAttention, source: int, out: int) -> None:
        settings, shape = part.settings, part.settings.shape
        size_q, size_k = settings.num_heads * shape.head_dim_k, shape.num_kv_heads * shape.head_dim_k
        qkv = self._buffer("qkv", size_q + size_k + shape.num_kv_heads * shape.head_dim_v)
        mixed = self._buffer("attention", settings.num_heads * shape.head_dim_v)
        self._linear(part.qkv, source, qkv)
        q_size, k_size = (size_q, size_k) if settings.norm_whole else (shape.head_dim_k, shape.head_dim_k)
        if isinstance(part.q_norm, LayerNorm):
            raise NotLoweredError("no native operation for a LayerNorm of queries")
        cos, sin = (0, 0) if part.rope is None else (table.data_ptr() for table in part.rope.tables)
        half = 0 if part.rope is None else part.rope.tables[0].shape[-1]
        where = (*self.planes[settings.layer], self.group_of_layer[settings.layer], qkv)
        q_norm, k_norm = self._norm(part.q_norm, q_size), self._norm(part.k_norm, k_size)
        self.program.add_qkv(settings.num_heads, q_norm, k_norm, cos, sin, half, *where)
        self.program.add_attention(settings.num_heads, settings.scale, settings.softcap or 0.0, *where, mixed)
        self._linear(part.o, mixed, out)

    def _experts(self, part: Experts, source: int, out: int) -> None:
        wides, outs = ([getattr(expert, name) for expert in part.experts] for name in ("wide", "out"))
        for linear in (*wides, *outs):
            if not isinstance(linear, NativeLinear):
                raise NotLoweredError(f"no native operation for an expert's linears by {linear.kernel}")
        first = part.experts[0]
        width = wides[0].out_features
        logits = self._buffer("router", len(part.experts))
        self._linear(part.router, source, logits)
        self.program.add_experts(
            *([(one.packed, one.activations, one.input_scale) for one in linears] for linears in (wides, outs)),
            part.per_token,
            part.renormalize,
            _function(first),
            first.gated,
            width // 2 if first.gated else width,
            source,
            logits,
            out,
        )

    def _mlp(self, part: MLP, source: int, out: int) -> None:
        function = _function(part)
        width = _out_features(part.wide)
        size = width // 2 if part.gated else width
        wide, active = self._buffer("wide", width), self._buffer("active", size)
        self._linear(part.wide, source, wide)
        self.program.add_activate(function, part.gated, size, wide, active)
        self._linear(part.out, active, out)

    def _linear(self, linear: Linear, source: int, out: int, column: int = 0) -> None:
        if isinstance(linear, SplitLinear):
            for part in linear.parts:
                self._linear(part, source, out, column)
                column += _out_features(part)
        elif isinstance(linear, NativeLinear):
            self.program.add_linear(linear.packed, linear.activations, linear.input_scale, source, out, column)
        else:
            raise NotLoweredError(f"no native operation for linears by {linear.kernel}")

    def _norm(self, norm: Norm | None, size: int) -> "native.Norm":
        if norm is None:
            return native.Norm()
        kind = native.NormKind.layer if isinstance(norm, LayerNorm) else native.NormKind.rms
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        return native.Norm(kind, size, norm.eps, self._float32(norm.weight), self._float32(bias))

    def _float32(self, tensor: Tensor | None) -> int:
        """The address of a copy."""
        if tensor is None:
            return 0
        self.tensors.append(tensor.float().contiguous())
        return self.tensors[-1].data_ptr()

    def _buffer(self, name: str, width: int) -> int:
        if (name, width) not in self.buffers:
            self.buffers[name, width] = self.program.add_buffer(width)
        return self.buffers[name, width]


def _function(part: MLP) -> "native.ActivationFunction":
    names = [name for name, function in ACTIVATIONS.items() if function is part.activation]
    return getattr(native.ActivationFunction, _FUNCTIONS[names[0]])


def _out_features(linear: Linear) -> int:
    if isinstance(linear, SplitLinear):
        return sum(_out_features(part) for part in linear.parts)
    if not isinstance(linear, NativeLinear):
        raise NotLoweredError(f"no native operation for linears by {linear.kernel}")
    return linear.out_features
