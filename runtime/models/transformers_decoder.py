"""Decoders that llmq has no data for: transformers' own modelling code, with our paged attention as its attention.

Only here does the runtime know transformers. Whatever a model's code does beside grouped-query attention over its own
keys and values would be computed wrongly in silence: all sequences of a step lie in one row, and only attention tells
them apart. So each model proves on a few tokens, before it serves, that its sequences do not see each other.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.batch import BatchInputs
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.self_attention import Step
from llmq.runtime.models.batch_probe import Attend, AttentionCall, BatchProbe

ATTENTION_NAME = "llmq_paged"

# They depend on the longest sequence of a batch: a request's tokens would depend on its neighbours.
_ROPES_OF_THE_BATCH = ("dynamic", "longrope")


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    llmq_attend: Attend | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, num_tokens, num_heads, head_dim], and no weights."""
    if llmq_attend is None:
        raise InputError(f"transformers' code of {type(module).__name__} does not hand its arguments to its attention")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(module.layer_idx, q, k, v, scale, softcap, sliding_window or None, others)
    return llmq_attend(call)[None], None


transformers.AttentionInterface.register(ATTENTION_NAME, paged_attention)


class _Passthrough(nn.Module):
    """Stands where the decoder stood, so that the model's own code makes logits of hidden states that are there."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersDecoder:
    """The interface of our Decoder over a causal language model of transformers."""

    kernels = rotations = frozenset({"transformers"})

    def __init__(self, model: nn.Module) -> None:
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}  # a tied one once
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.dense_weights = {
            name: module.weight.data for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        self._decoder = model.base_model
        self._model = model
        setattr(model, model.base_model_prefix, _Passthrough())

    def forward(self, inputs: BatchInputs, store: KVStore, attention: AttentionBackend) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of all positions of the step, after the final norm."""
        step = Step.of(inputs, store, attention)
        return self.hidden_states(
            inputs.token_ids,
            inputs.positions,
            lambda call: step.attend(call.layer, call.q, call.k, call.v, call.scale, call.softcap),
        )

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        made = self._decoder(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, llmq_attend=attend
        )
        return made[0][0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        return self._model(inputs_embeds=hidden[None], use_cache=False).logits[0].float()


class TransformersLoader:
    """Loads what `model_type` is to transformers. Raises InputError, before a weight is read where that can be."""

    packed_weights = ""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.architecture = checkpoint.architecture
        self.schemes: dict[str, int] = {}
        model_type = self.architecture.model_type
        if checkpoint.quantization is not None:
            raise InputError(
                f"model_type {model_type!r} runs by transformers' own code, and quantized checkpoints do not run there"
            )
        try:
            self._config = transformers.AutoConfig.from_pretrained(checkpoint.path)
            self._class = transformers.AutoModelForCausalLM._model_mapping[type(self._config)]
        except (ValueError, KeyError):
            raise InputError(
                f"neither the runtime nor transformers {transformers.__version__} has a decoder of model_type "
                f"{model_type!r}"
            ) from None
        if not self._class.is_backend_compatible():
            raise InputError(
                f"transformers' code of model_type {model_type!r} ({self._class.__name__}) calls its own attention, so "
                "that ours cannot take its place"
            )
        if kinds := sorted(_rope_types(self._config.to_dict()) & set(_ROPES_OF_THE_BATCH)):
            raise InputError(
                f"model_type {model_type!r} by transformers' code with rope type {kinds[0]!r}: a sequence's positions "
                "would depend on the longest one beside it"
            )

    @property
    def implementation(self) -> str:
        return f"transformers {transformers.__version__}, {self._class.__name__}"

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        raise InputError("a checkpoint's static KV scales are not read for transformers' code")

    def load(self, max_model_len: int) -> TransformersDecoder:
        transformers.utils.logging.disable_progress_bar()
        model, info = self._class.from_pretrained(
            self.checkpoint.path,
            config=self._config,
            dtype=self.dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, info[kind])):
                raise InputError(f"the checkpoint has {kind.replace('_', ' ')} for {self._class.__name__}: {names[0]}")
        model = model.eval().requires_grad_(False).to(self.device)
        linears = sum(isinstance(module, nn.Linear) for module in model.modules())
        self.schemes[str(self.dtype).removeprefix("torch.")] = linears
        return self._proven(model)

    def _proven(self, model: nn.Module) -> TransformersDecoder:
        probe = BatchProbe(self.architecture, self.device)
        try:
            whole = probe.logits_of(model)
            decoder = TransformersDecoder(model)
            probe.check(decoder, whole)
        # Foreign code: whatever it raises on eight tokens, it would raise on a request.
        except Exception as error:
            reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise InputError(f"{self.implementation} cannot run over our attention: {reason}") from error
        return decoder


def _rope_types(config: Any) -> set[str]:
    """Every `rope_type` anywhere in a config."""
    if isinstance(config, dict):
        own = {str(config[name]) for name in ("rope_type", "type") if isinstance(config.get(name), str)}
        return own.union(*(_rope_types(value) for value in config.values()))
    return set()
