"""A checkpoint's tensors -> a Decoder. Tensors are memory-mapped and taken one linear at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.decoder_tensors import UNUSED_SUFFIXES
from llmq.profiles.errors import InputError
from llmq.profiles.families import DecoderFamily, ExpertNames, NormNames, value
from llmq.quantize.formats.base import CheckpointFormat
from llmq.quantize.formats.registry import format_of
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.formats.stacked import stack_rows
from llmq.runtime.dtypes import NativeNumerics
from llmq.runtime.kernels import native
from llmq.runtime.layers.kept_linears import entry_of, linear_of, packing_code
from llmq.runtime.layers.linear import DenseLinear, FixedRowsLinear, Linear, Weight, make_linear
from llmq.runtime.layers.mlp import ACTIVATIONS, MLP, Activation, Experts
from llmq.runtime.layers.native_linear import NativeLinear, rounded_to_int8
from llmq.runtime.layers.norm import LayerNorm, Norm, RMSNorm, RMSNormPlusOne, root_as_stored
from llmq.runtime.layers.rope import RopeParameters, RotaryEmbedding, ropes_of
from llmq.runtime.layers.self_attention import AttentionSettings, SelfAttention
from llmq.runtime.layers.tile_check import settle_tiles
from llmq.runtime.models.decoder import Decoder, OutputHead, ResidualBlock
from llmq.runtime.packed_cache import PackedCache
from llmq.runtime.parallel.collectives import Collectives
from llmq.runtime.parallel.norm import SplitRMSNorm
from llmq.runtime.parallel.shard_plan import REPLICATED, Shard, ShardPlan, check_ranks
from llmq.runtime.parallel.stage_plan import Stage, whole
from llmq.runtime.parallel.vocabulary import SplitVocabulary

# What was read of a file stays in memory while the file is mapped, or a tensor of it is held: it is mapped anew after
# so much, and small tensors, which are held, are copied.
_MAPPED_BYTES, _SMALL_BYTES = 64 << 20, 1 << 20


class TensorReader:
    """Tensors of a checkpoint by name, counting which were read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files = {name: checkpoint.path / info.file for name, info in checkpoint.tensors.items()}
        self._open: dict[Path, safe_open] = {}
        self._read_bytes: dict[Path, int] = {}  # since it was opened
        self.read: list[str] = []  # in order, maybe more than once

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __call__(self, name: str) -> Tensor:
        """The tensor, memory-mapped or copied; KeyError where the checkpoint has none of this name."""
        path = self._files[name]
        if path not in self._open or self._read_bytes[path] >= _MAPPED_BYTES:
            self._open[path], self._read_bytes[path] = safe_open(path, framework="pt"), 0
        self.read.append(name)
        tensor = self._open[path].get_tensor(name)
        self._read_bytes[path] += tensor.nbytes
        return tensor.clone() if tensor.nbytes <= _SMALL_BYTES else tensor

    def unread(self) -> Iterator[str]:
        read = set(self.read)
        return (name for name in self._files if name not in read)


class DecoderLoader:
    """Builds the Decoder that a checkpoint describes, in `dtype` on `device`. Raises InputError for what is missing,
    for what is there and would not be used, and for what the runtime does not run."""

    implementation = "llmq"

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: DecoderFamily,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        native: NativeNumerics | None = None,
        collectives: Collectives | None = None,
        first_layer: int = 0,
        stage: Stage | None = None,
    ) -> None:
        """collectives: of the ranks that share the layers, of which this loads one's part; None: they are whole.
        first_layer: its number in the KVStore, where that is another decoder's too. stage: which layers, and what
        before and behind them, are loaded; None: all."""
        self.config = {**checkpoint.config, **checkpoint.config.get("text_config", {})}
        self.family = family
        self.architecture = checkpoint.architecture
        self.dtype, self.device = dtype, device
        self.batch_invariant, self.native = batch_invariant, native
        if native is not None:
            settle_tiles()
        self.checkpoint = checkpoint
        self.tensors = TensorReader(checkpoint)
        self.packed: PackedCache | None = None  # while weights are loaded for native kernels
        self.quantization: CheckpointFormat | None = None
        if checkpoint.quantization:
            self.quantization = format_of(checkpoint.quantization, checkpoint.tensors.keys())
        self.stage = stage or whole(self.architecture.num_layers)
        self.collectives, self.first_layer = collectives, first_layer
        num_ranks, rank = (1, 0) if collectives is None else (collectives.num_ranks, collectives.rank)
        if num_ranks > 1:
            check_ranks(self.architecture, self.config, num_ranks, self._schemes())
        self.plan = ShardPlan(self.architecture, family, self.config, num_ranks, rank)
        self.schemes: dict[str, int] = {}  # what linears are made of -> how many
        self.dense_weights: dict[str, Tensor] = {}  # linear in 16 bit -> its rows of what is multiplied with
        self.rope_parameters = ropes_of(self.config, family, self.architecture.num_layers)
        self.activation = _activation(self._value("activation"))
        if "text_config" in checkpoint.config and "model.embed_tokens.weight" not in self.tensors:
            raise InputError(
                f"model_type {checkpoint.config.get('model_type')!r} is of more than text, and so is its checkpoint: "
                f"the runtime runs a checkpoint of the text decoder ({self.config['model_type']}) alone"
            )
        if self.config.get("use_bidirectional_attention"):
            raise InputError("config.json: use_bidirectional_attention: this model reads ahead, it does not generate")

    def load(self, max_model_len: int) -> Decoder:
        if self.native is not None and native is not None and self.device.type == "cpu":
            self.packed = self._packed_cache()
        try:
            return self._load(max_model_len)
        finally:
            if self.packed is not None:
                self.packed.close()

    def _load(self, max_model_len: int) -> Decoder:
        embedding = None
        if self._is_here("model.embed_tokens.weight"):
            embedding = self._dense("model.embed_tokens.weight", self.plan.shard("model.embed_tokens"))
        head = self._output_head(embedding) if self.stage.is_last else None
        layers = range(*self.stage.layers)
        ropes = self._ropes(max_model_len)
        blocks = []
        for index, rope in zip(layers, ropes, strict=True):
            blocks.append(self._block(index, self.family.attention_norms, self._attention(index, rope)))
            blocks.append(self._block(index, self.family.mlp_norms, self._mlp(index)))
        decoder = Decoder(
            embedding=embedding if self.stage.is_first else None,
            embedding_scale=self._embedding_scale(),
            blocks=blocks,
            final_norm=self._norm("model.norm") if self.stage.is_last else None,
            head=head,
            ropes=list(dict.fromkeys(rope for rope in ropes if rope is not None)),
            dense_weights=self.dense_weights,
            vocabulary=None if self.collectives is None else SplitVocabulary.of(self.plan, self.collectives),
        )
        self._check_all_read()
        if self.packed is not None:
            self.packed.save()
        return decoder

    @property
    def packed_weights(self) -> str:
        return "" if self.packed is None else self.packed.said

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """The checkpoint's static scales of the KV-cache: layer of the stage -> K's and V's."""
        return {
            index - self.stage.layers[0]: tuple(
                float(self._dense(f"model.layers.{index}.self_attn.{name}_scale").float().squeeze()) for name in "kv"
            )
            for index in range(*self.stage.layers)
        }

    def _is_here(self, name: str) -> bool:
        return self.stage.holds(name, self.architecture.tie_word_embeddings)

    def _value(self, setting: str) -> Any:
        return value(getattr(self.family, setting), self.config)

    def _ropes(self, max_model_len: int) -> list[RotaryEmbedding | None]:
        """The rotation of each layer, one object for all layers that rotate alike."""
        made: list[tuple[RopeParameters, RotaryEmbedding]] = []
        ropes = []
        for parameters in self.rope_parameters[slice(*self.stage.layers)]:
            known = next((rope for same, rope in made if same == parameters), None)
            if known is None and parameters is not None:
                known = RotaryEmbedding(parameters, max_model_len, self.device)
                made.append((parameters, known))
            ropes.append(known)
        return ropes

    def _embedding_scale(self) -> float | None:
        if self.family.embedding_scale == "sqrt hidden":
            return root_as_stored(self.architecture.hidden_size, self.dtype)
        return self._value("embedding_scale")

    def _block(self, index: int, names: NormNames, part: SelfAttention | MLP | Experts) -> ResidualBlock:
        before, after = (name and self._norm(f"model.layers.{index}.{name}") for name in (names.before, names.after))
        all_reduce = None if self.collectives is None else self.collectives.all_reduce
        return ResidualBlock(part, before, after, self._value("residual_scale"), all_reduce)

    def _attention(self, index: int, rope: RotaryEmbedding | None) -> SelfAttention:
        layer, family = f"model.layers.{index}", self.family
        shape = replace(self.architecture.attention[index], num_kv_heads=self.plan.num_kv_heads)
        scale = self._value("attention_scale")
        if scale is None:
            scale = (self._value("query_scalar") or shape.head_dim_k) ** -0.5
        q_norm, k_norm = (
            self._norm(f"{layer}.self_attn.{name}_norm") if family.qk_norm is not None else None for name in "qk"
        )
        if self.collectives is not None and family.qk_norm == "projection":
            q_norm, k_norm = (SplitRMSNorm(norm.weight, norm.eps, self.collectives) for norm in (q_norm, k_norm))
        return SelfAttention(
            AttentionSettings(
                layer=self.first_layer + index - self.stage.layers[0],
                num_heads=self.plan.num_heads,
                shape=shape,
                scale=scale,
                softcap=self._value("attention_softcap"),
                norm_whole=family.qk_norm == "projection",
            ),
            qkv=self._linear(*(f"{layer}.{name}" for name in family.qkv), has_bias=self._value("qkv_bias")),
            o=self._linear(f"{layer}.{family.o}", has_bias=self._value("o_bias")),
            q_norm=q_norm,
            k_norm=k_norm,
            rope=rope,
        )

    def _mlp(self, index: int) -> MLP | Experts:
        layer, family, has_bias = f"model.layers.{index}", self.family, self._value("mlp_bias")
        if family.experts is not None and family.experts.has_layer(index, self.config):
            return self._experts(layer, family.experts)
        return MLP(
            self._linear(*(f"{layer}.{name}" for name in family.mlp_in), has_bias=has_bias),
            self._linear(f"{layer}.{family.mlp_out}", has_bias=has_bias),
            self.activation,
            family.gated,
        )

    def _experts(self, layer: str, names: ExpertNames) -> Experts:
        experts = []
        for number in range(names.count.of(self.config)):
            expert = f"{layer}.{names.experts}.{number}"
            wide = self._linear(f"{expert}.{names.gate}", f"{expert}.{names.up}")
            experts.append(MLP(wide, self._linear(f"{expert}.{names.down}"), self.activation, gated=True))
        return Experts(
            self._linear(f"{layer}.{names.router}"),
            experts,
            names.per_token.of(self.config),
            value(names.renormalize, self.config),
        )

    def _norm(self, name: str) -> Norm:
        weight, eps = self._dense(f"{name}.weight", self.plan.shard(name)), self._value("norm_eps")
        if self.family.norm == "layer":
            return LayerNorm(weight, self._dense(f"{name}.bias"), eps)
        return (RMSNormPlusOne if self.family.norm == "rms plus one" else RMSNorm)(weight, eps)

    def _packed_cache(self) -> PackedCache:
        settings = {"isa": native.isa(), "numerics": str(self.native), "dtype": str(self.dtype)}
        settings["rank"] = f"{self.plan.rank} of {self.plan.num_ranks}"
        settings["stage"] = str(self.stage.layers)
        return PackedCache(self.checkpoint, settings, packing_code())

    def _once(self, name: str, make: Callable[[], Linear]) -> Linear:
        """`make()`, or what it packed at an earlier load, accounted for alike."""
        if self.packed is None:
            return make()
        if (entry := self.packed.find(name)) is not None:
            self.tensors.read += entry.facts["read"]
            for kind, count in entry.facts["schemes"].items():
                self.schemes[kind] = self.schemes.get(kind, 0) + count
            return linear_of(entry)
        num_read, schemes = len(self.tensors.read), dict(self.schemes)
        linear = make()
        made = {kind: more for kind, count in self.schemes.items() if (more := count - schemes.get(kind, 0))}
        entry = entry_of(linear, {"read": self.tensors.read[num_read:], "schemes": made})
        if entry is None:
            return linear
        kept = self.packed.add(name, entry)
        return linear if kept is entry else linear_of(kept)

    def _linear(self, *names: str, has_bias: bool = False) -> Linear:
        return self._once(" ".join(names), lambda: self._read_linear(names, has_bias))

    def _read_linear(self, names: Sequence[str], has_bias: bool) -> Linear:
        weights = [self._weight(name) for name in names]
        biases = [self._bias(name) if has_bias else None for name in names]
        linear = self._made(weights, biases)
        if isinstance(linear, DenseLinear):
            self.dense_weights.update(zip(names, linear.weight.split([len(weight) for weight in weights]), strict=True))
        return self._as_run(linear)

    def _made(self, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> Linear:
        rounds = self.native is not None and self.native.int8_activations
        return make_linear(weights, biases, self.dtype, self.native is not None, rounds)

    def _output_head(self, embedding: Tensor | None) -> OutputHead:
        if self.architecture.tie_word_embeddings:
            # The same storage, held once; native kernels want an order of their own, beside the embedding's rows.
            head = self._once("head", lambda: self._head(embedding))
        elif self.native is not None and self.native.int8_head:
            head = self._once("head", lambda: self._head(self._weight("lm_head")))
        else:
            head = self._linear("lm_head")
        return OutputHead(head, self._value("logits_divisor"), self._value("logits_softcap"))

    def _head(self, weight: Tensor) -> Linear:
        if self.native is not None and self.native.int8_head:
            group_size = self.native.head_group_size(weight.shape[1])
            return NativeLinear(rounded_to_int8(weight, group_size), None, int8_activations=group_size is not None)
        return self._as_run(self._made([weight], [None]))

    def _as_run(self, linear: Linear) -> Linear:
        needs_it = self.batch_invariant and not isinstance(linear, NativeLinear)
        return FixedRowsLinear(linear) if needs_it else linear

    def _weight(self, name: str) -> Weight:
        scheme = self.quantization.scheme_for(name) if self.quantization else None
        kind = scheme.name if scheme else str(self.dtype).removeprefix("torch.")
        self.schemes[kind] = self.schemes.get(kind, 0) + 1
        shard = self.plan.shard(name)
        if scheme is None:
            return self._dense(f"{name}.weight", shard)
        parts = [self.quantization.read(name, self.tensors, rows, shard.columns) for rows in shard.rows or (None,)]
        weight = stack_rows(parts)
        return (weight if shard == REPLICATED else weight.contiguous()).to(self.device)

    def _bias(self, name: str) -> Tensor | None:
        """None on the ranks that leave it to another, where it is read to be accounted for."""
        shard = self.plan.shard(name)
        bias = self._dense(f"{name}.bias", replace(shard, columns=None))
        return bias if shard.has_bias else None

    def _dense(self, name: str, shard: Shard = REPLICATED) -> Tensor:
        try:
            tensor = self.tensors(name)
        except KeyError:
            raise InputError(f"the checkpoint has no tensor {name}, which its config.json calls for") from None
        if shard.rows is not None:
            parts = [tensor[start:stop] for start, stop in shard.rows]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if shard.columns is not None:
            tensor = tensor[:, slice(*shard.columns)].contiguous()
        return tensor.to(device=self.device, dtype=self.dtype)

    def _schemes(self) -> dict[str, WeightScheme]:
        """What is declared of each quantized module."""
        modules = {name.rpartition(".")[0] for name in self.tensors} if self.quantization else set()
        return {module: scheme for module in modules if (scheme := self.quantization.scheme_for(module)) is not None}

    def _check_all_read(self) -> None:
        """A tensor that nothing reads is a model that is not computed as it was stored."""
        ignored: Sequence[str] = UNUSED_SUFFIXES
        if self.architecture.tie_word_embeddings:
            ignored = (*ignored, "lm_head.weight")
        left = [name for name in self.tensors.unread() if self._is_here(name) and not name.endswith(tuple(ignored))]
        if self.quantization:
            left = [name for name in left if not self.quantization.may_ignore(name, self.tensors)]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise InputError(
                f"the checkpoint holds tensors that model_type {self.config['model_type']!r} does not use, so it would "
                f"not compute what it stores: {', '.join(left[:3])}{more}"
            )


def _activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise InputError(f"config.json: activation {name!r} is not supported ({', '.join(ACTIVATIONS)} are)")
    return ACTIVATIONS[name]
