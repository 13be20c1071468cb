"""A checkpoint's tensors -> a Decoder. Tensors are memory-mapped and taken one linear at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.quantize.formats.compressed_tensors import QuantizationConfig
from llmq.runtime.layers.linear import DenseLinear, Linear, Weight, make_linear
from llmq.runtime.layers.rope import RopeParameters, RotaryEmbedding
from llmq.runtime.models.decoder import Decoder, DecoderLayer
from llmq.runtime.models.families import DecoderFamily, family_of

# Stored by some writers, and nothing of it is lost by not reading it: buffers, and a tied head's second copy.
UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)


class TensorReader:
    """Tensors of a checkpoint by name, counting which were read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files = {name: checkpoint.path / info.file for name, info in checkpoint.tensors.items()}
        self._open: dict[Path, safe_open] = {}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str) -> Tensor:
        """The tensor, memory-mapped; KeyError where the checkpoint has none of this name."""
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        self._read.add(name)
        return self._open[path].get_tensor(name)

    def unread(self) -> Iterator[str]:
        return (name for name in self._files if name not in self._read)


class DecoderLoader:
    """Builds the Decoder that a checkpoint describes, in `dtype` on `device`. Raises InputError for what is missing,
    for what is there and would not be used, and for what the runtime does not run."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.config = {**checkpoint.config, **checkpoint.config.get("text_config", {})}
        self.family: DecoderFamily = family_of(self.config)
        self.architecture = checkpoint.architecture
        self.dtype, self.device = dtype, device
        self.tensors = TensorReader(checkpoint)
        self.quantization = QuantizationConfig.from_config(checkpoint.quantization) if checkpoint.quantization else None
        self.schemes: dict[str, int] = {}  # what linears are made of -> how many

    def load(self, max_model_len: int) -> Decoder:
        embedding = self._dense("model.embed_tokens.weight")
        if self.architecture.tie_word_embeddings:
            head: Linear = DenseLinear(embedding, None)  # the same storage: held once
        else:
            head = self._linear("lm_head")
        decoder = Decoder(
            architecture=self.architecture,
            embedding=embedding,
            layers=[self._layer(index) for index in range(self.architecture.num_layers)],
            final_norm=self._dense("model.norm.weight"),
            head=head,
            rope=RotaryEmbedding(
                RopeParameters.from_config(self.config), self.architecture.head_dim, max_model_len, self.device
            ),
            rms_norm_eps=self.config.get("rms_norm_eps", 1e-6),
        )
        self._check_all_read()
        return decoder

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """The checkpoint's static scales of the KV-cache: layer -> K's and V's."""
        return {
            index: tuple(
                float(self._dense(f"model.layers.{index}.self_attn.{name}_scale").float().squeeze()) for name in "kv"
            )
            for index in range(self.architecture.num_layers)
        }

    def _layer(self, index: int) -> DecoderLayer:
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        has_qkv_bias = self.family.has("qkv_bias", self.config)
        has_mlp_bias = self.family.has("mlp_bias", self.config)
        return DecoderLayer(
            input_norm=self._dense(f"{layer}.input_layernorm.weight"),
            qkv=self._linear(*(f"{attention}.{name}_proj" for name in "qkv"), has_bias=has_qkv_bias),
            q_norm=self._dense(f"{attention}.q_norm.weight") if self.family.qk_norm else None,
            k_norm=self._dense(f"{attention}.k_norm.weight") if self.family.qk_norm else None,
            o=self._linear(f"{attention}.o_proj", has_bias=self.family.has("o_bias", self.config)),
            post_attention_norm=self._dense(f"{layer}.post_attention_layernorm.weight"),
            gate_up=self._linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", has_bias=has_mlp_bias),
            down=self._linear(f"{mlp}.down_proj", has_bias=has_mlp_bias),
        )

    def _linear(self, *names: str, has_bias: bool = False) -> Linear:
        weights = [self._weight(name) for name in names]
        biases = [self._dense(f"{name}.bias") if has_bias else None for name in names]
        return make_linear(weights, biases, self.dtype)

    def _weight(self, name: str) -> Weight:
        scheme = self.quantization.scheme_for(name) if self.quantization else None
        kind = scheme.name if scheme else str(self.dtype).removeprefix("torch.")
        self.schemes[kind] = self.schemes.get(kind, 0) + 1
        if scheme is None:
            return self._dense(f"{name}.weight")
        return self.quantization.read(name, self.tensors).to(self.device)

    def _dense(self, name: str) -> Tensor:
        try:
            tensor = self.tensors(name)
        except KeyError:
            raise InputError(f"the checkpoint has no tensor {name}, which its config.json calls for") from None
        return tensor.to(device=self.device, dtype=self.dtype)

    def _check_all_read(self) -> None:
        """A tensor that nothing reads is a model that is not computed as it was stored."""
        ignored: Sequence[str] = UNUSED_SUFFIXES
        if self.architecture.tie_word_embeddings:
            ignored = (*ignored, "lm_head.weight")
        if self.quantization and self.quantization.kv_cache_scheme:
            ignored = (*ignored, ".k_scale", ".v_scale")  # of the KV dtype that the checkpoint suggests
        left = [name for name in self.tensors.unread() if not name.endswith(tuple(ignored))]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise InputError(
                f"the checkpoint holds tensors that model_type {self.config['model_type']!r} does not use, so it would "
                f"not compute what it stores: {', '.join(left[:3])}{more}"
            )
