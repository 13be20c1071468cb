"""A decoder's layers one at a time, through transformers' own modules: one layer's weights in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import FailedError


class TensorReader:
    """Reads a checkpoint's tensors by name."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    def __call__(self, name: str) -> Tensor:
        file = self.checkpoint.tensors[name].file
        with safe_open(self.checkpoint.path / file, "pt") as opened:
            return opened.get_tensor(name)


class _Probe(nn.Module):
    """Stands where a decoder layer was and keeps what the model passes it."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.kwargs = kwargs
        return hidden_states


class LayerStream:
    """The decoder layers of a checkpoint, in float32 on `device`, and the inputs each gets.

    The model is built without weights; a layer has them only inside `layer()`. What a layer is called with (mask,
    rotary embeddings) is what the model's own forward passes, so that nothing of an architecture is repeated here.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.read, self.device = TensorReader(checkpoint), device
        self._names = tuple(checkpoint.tensors)
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        config.use_cache = False
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().model
        self._layers = list(self._model.layers)
        self._prepare_skeleton(config)
        self._kwargs_by_length: dict[int, list[dict[str, Any]]] = {}

    def _prepare_skeleton(self, config: Any) -> None:
        """Give the model all that runs beside its layers: rotary frequencies are computed, not stored."""
        model = self._model
        model.rotary_emb = type(model.rotary_emb)(config=config).to(self.device)
        model.layers = nn.ModuleList([_Probe() for _ in self._layers])
        model.norm = nn.Identity()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def embed(self, samples: tuple[tuple[int, ...], ...]) -> list[Tensor]:
        """The first layer's inputs: float32 [1, length, hidden] for each sample, on the CPU."""
        table = self.read("model.embed_tokens.weight")
        return [table[torch.tensor(ids)].to(torch.float32).unsqueeze(0) for ids in samples]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Decoder layer `index` with its weights in float32; they are let go at the end."""
        prefix = f"model.layers.{index}."
        state = {
            name.removeprefix(prefix): self.read(name).to(self.device, torch.float32)
            for name in self._names
            if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq")
        }
        layer = self._layers[index]
        missing, unexpected = layer.load_state_dict(state, strict=False, assign=True)
        if missing or unexpected:
            raise FailedError(f"layer {index}: tensors {missing or unexpected} are not what the architecture has")
        try:
            yield layer
        finally:
            layer.to("meta")

    def run(self, index: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The layer's output for one sample, [1, length, hidden] -> the same, on the CPU."""
        kwargs = self._kwargs(hidden.shape[1])[index]
        output = layer(hidden.to(self.device), **kwargs)
        return (output[0] if isinstance(output, tuple) else output).to("cpu")

    def _kwargs(self, length: int) -> list[dict[str, Any]]:
        if length not in self._kwargs_by_length:
            embeds = torch.zeros(1, length, self._model.config.hidden_size, device=self.device)
            self._model(inputs_embeds=embeds, use_cache=False)
            self._kwargs_by_length[length] = [probe.kwargs for probe in self._model.layers]
        return self._kwargs_by_length[length]
