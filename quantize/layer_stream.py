"""A decoder's layers one at a time, through transformers' own modules: one layer's weights in memory."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.machine import cpu_flags
from llmq.profiles.safetensors_file import TensorInfo, read_places
from llmq.quantize.experts import UnfusedExperts, unfuse
from llmq.quantize.sizes import batch_tokens

# Lengths whose masks and rotary embeddings are kept: a mask is length * length.
_KEPT_LENGTHS = 4


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


class TensorReader:
    """Reads a checkpoint's tensors by name. Of a file no more is mapped than the tensors that are held: the pages of a
    whole file would stay in the process's memory. Its header is read once: of a large mixture it takes a millisecond.
    """

    def __init__(self, checkpoint: Checkpoint):
        self._path_of = lambda name: checkpoint.path / checkpoint.tensors[name].file
        self._places: dict[Path, tuple[dict[str, TensorInfo], dict[str, int]]] = {}

    @classmethod
    def of_file(cls, path: Path) -> "TensorReader":
        """Of one safetensors file."""
        reader = cls.__new__(cls)
        reader._path_of, reader._places = lambda name: path, {}
        return reader

    def __call__(self, name: str) -> Tensor:
        """The tensor, mapped from the file; what is written into it does not reach the file."""
        path = self._path_of(name)
        if path not in self._places:
            self._places[path] = read_places(path)
        info, begin = self._places[path][0][name], self._places[path][1][name]
        if not info.num_bytes or info.dtype not in _DTYPES:
            with safe_open(path, "pt") as opened:
                return opened.get_tensor(name)
        before = begin % mmap.ALLOCATIONGRANULARITY
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), before + info.num_bytes, access=mmap.ACCESS_COPY, offset=begin - before)
        raw = torch.frombuffer(mapped, dtype=torch.uint8, offset=before)
        return raw.view(_DTYPES[info.dtype]).view(info.shape)


def check_finite(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    """Raise InputError, before anything is computed with it, for a tensor of the source that holds a NaN or infinity.

    By its least and its largest number, which a NaN would be both: `isfinite` takes 25 times as long, and memory.
    """
    if is_finite(tensor):
        return
    count = int((~torch.isfinite(tensor)).sum())
    raise InputError(f"{checkpoint.path}: {name} holds {count:,} numbers that are not finite: it cannot be quantized")


def is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


class _Probe(nn.Module):
    """Stands where a decoder layer was and keeps what the model passes it."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.hidden_states, self.kwargs = hidden_states, kwargs
        return hidden_states


class LayerStream:
    """The decoder layers of a checkpoint, in float32 on `device`, and the inputs each gets.

    The model is built without weights; a layer has them only inside `layer()`. What a layer is called with (mask,
    rotary embeddings) and what the first one reads is what the model's own forward makes, so that nothing of an
    architecture is repeated here.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.checkpoint, self.read, self.device = checkpoint, TensorReader(checkpoint), device
        self.served_dtype = served_dtype(checkpoint, device)
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        config.use_cache = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._model = getattr(model, "model", None)
        if not all(hasattr(self._model, part) for part in ("layers", "embed_tokens", "norm", "rotary_emb")):
            raise FailedError(
                f"model_type {checkpoint.architecture.model_type!r}: transformers' {type(model).__name__} is not built "
                "as the decoders that can be calibrated here; --rtn and --fp8 need no calibration"
            )
        self._layers = list(self._model.layers)
        widest = max(config.hidden_size, getattr(config, "intermediate_size", None) or 0)
        self._batch_tokens = batch_tokens(widest)
        self._prepare_skeleton(config)
        self._kwargs_by_length: dict[int, list[dict[str, Any]]] = {}

    def _prepare_skeleton(self, config: Any) -> None:
        """Give the model all that runs beside its layers: rotary frequencies are computed, not stored."""
        model = self._model
        model.rotary_emb = type(model.rotary_emb)(config=config).to(self.device)
        model.layers = nn.ModuleList([_Probe() for _ in self._layers])
        model.norm = nn.Identity()
        embed = model.embed_tokens
        for name, _ in list(embed.named_buffers(recurse=False)):  # Gemma's factor, which is not stored either
            setattr(embed, name, torch.tensor(getattr(embed, f"scalar_{name}"), device=self.device))
        embed.padding_idx = None
        rest = [name for name, part in model.named_children() if name != "embed_tokens" and _has_no_weights(part)]
        if rest:
            raise FailedError(
                f"model_type {self.checkpoint.architecture.model_type!r} has {', '.join(rest)} beside its layers, "
                "which cannot be calibrated here; --rtn and --fp8 need no calibration"
            )

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def embed(self, samples: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """The first layer's inputs: float32 [batch, length, hidden] on the CPU, samples of one length together."""
        used = torch.tensor(sorted({token for ids in samples for token in ids}))
        table = self.read("model.embed_tokens.weight")[used]  # of 150,000 words a few thousand are met
        self._model.embed_tokens.weight = nn.Parameter(table.to(self.device, torch.float32), requires_grad=False)
        for ids in _batches(samples, self._batch_tokens):
            self._model(input_ids=torch.searchsorted(used, ids).to(self.device), use_cache=False)
            yield self._model.layers[0].hidden_states.to("cpu", copy=True)
        self._model.embed_tokens.to("meta")

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Decoder layer `index` with its weights in float32; they are let go at the end.

        Its modules have the names of the checkpoint, relative to the layer.
        """
        prefix = f"model.layers.{index}."
        layer, family = self._layers[index], self.checkpoint.architecture.family
        if family is not None and family.experts is not None:
            unfuse(layer, family.experts)
        state = {
            # A copy: a tensor read may be a view of the file, wherever in a page it lies.
            name.removeprefix(prefix): self.read(name).to(self.device, torch.float32, copy=True)
            for name in self.checkpoint.tensors
            if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq")
        }
        for name, tensor in state.items():
            check_finite(self.checkpoint, prefix + name, tensor)
        missing, unexpected = layer.load_state_dict(state, strict=False, assign=True)
        if missing or unexpected:
            raise FailedError(f"layer {index}: tensors {missing or unexpected} are not what the architecture has")
        try:
            yield layer
        finally:
            layer.to("meta")

    def run(self, index: int, layer: nn.Module, hidden: Tensor, **changed: Any) -> Tensor:
        """The layer's output for a batch of samples, [batch, length, hidden] -> the same, on the device.

        changed: keyword arguments of the layer other than those that the model passes.
        """
        kwargs = {**self._kwargs(hidden.shape[1])[index], **changed}
        output = layer(hidden.to(self.device), **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def run_as_served(self, index: int, layer: nn.Module, hidden: Tensor, **changed: Any) -> Tensor:
        """`run` with its products in `served_dtype`, as whoever serves the model computes them: linears and attention.
        The residual stream and the norms stay in float32, and so does what is returned.
        """
        is_reduced = self.served_dtype != torch.float32
        # Without the cache of weights that were cast: it would hold a second copy of the layer.
        with torch.autocast(self.device.type, self.served_dtype, enabled=is_reduced, cache_enabled=False):
            return self.run(index, layer, hidden, **changed).to(torch.float32)

    def _kwargs(self, length: int) -> list[dict[str, Any]]:
        if length not in self._kwargs_by_length:
            if len(self._kwargs_by_length) == _KEPT_LENGTHS:
                self._kwargs_by_length.pop(next(iter(self._kwargs_by_length)))
            embeds = torch.zeros(1, length, self._model.config.hidden_size, device=self.device)
            self._model(inputs_embeds=embeds, use_cache=False)
            self._kwargs_by_length[length] = [probe.kwargs for probe in self._model.layers]
        return self._kwargs_by_length[length]


def served_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """What a layer multiplies in for calibration: bfloat16 where the checkpoint is in it and the device has such
    products, which take less than half the time of float32's; else float32.
    """
    if checkpoint.architecture.dtype.removeprefix("torch.") != "bfloat16":
        return torch.float32
    if device.type == "cuda":
        has_products = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_products = not cpu_flags().isdisjoint(("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if has_products else torch.float32


def experts_of(layer: nn.Module) -> UnfusedExperts | None:
    return next((module for module in layer.modules() if isinstance(module, UnfusedExperts)), None)


def _batches(samples: Sequence[Sequence[int]], max_tokens: int) -> Iterator[Tensor]:
    """int64 [batch, length]: samples of one length together, the longest first, at most `max_tokens` or one sample."""
    by_length: dict[int, list[Sequence[int]]] = {}
    for ids in samples:
        by_length.setdefault(len(ids), []).append(ids)
    for length in sorted(by_length, reverse=True):
        size = max(1, max_tokens // length)
        alike = by_length[length]
        yield from (torch.tensor(alike[start : start + size]) for start in range(0, len(alike), size))


def _has_no_weights(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
