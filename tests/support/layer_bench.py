"""One decoder layer of a tiny model with inputs of which a few channels stand out: what a method works on."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from llmq.profiles.checkpoint import read_checkpoint
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.layer_stream import LayerStream
from llmq.quantize.layer_work import LayerWork
from llmq.quantize.mappings import mappings_of

G16 = WeightScheme("int", 4, "group", 16, symmetric=False)
ALL = {
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
GQA_9_3 = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}


class LayerBench:
    def __init__(self, folder: Path, index: int = 1):
        checkpoint = read_checkpoint(folder)
        self.stream, self.index = LayerStream(checkpoint, torch.device("cpu")), index
        self.mappings = mappings_of(checkpoint, 0)
        self.head_dim = checkpoint.architecture.head_dim
        hidden = checkpoint.architecture.hidden_size
        torch.manual_seed(0)
        self.samples = [torch.randn(1, length, hidden) for length in (7, 24, 40)]
        for sample in self.samples:
            sample[..., ::17] *= 8

    def work(
        self,
        layer: nn.Module,
        quantized: Iterable[str] = ALL,
        dtype: torch.dtype = torch.bfloat16,
        scheme: WeightScheme = G16,
    ) -> LayerWork:
        schemes = dict.fromkeys(sorted(quantized), scheme)
        run = partial(self.stream.run, self.index, layer)
        served = partial(self.stream.run_as_served, self.index, layer)
        return LayerWork(layer, schemes, self.mappings, self.samples, run, served, dtype, self.head_dim)

    def addition(self, layer: nn.Module, sample: Tensor) -> Tensor:
        """What the layer adds to its input."""
        return self.stream.run(self.index, layer, sample) - sample
