"""One evaluator for every row: transformers' forward in bf16 over the dequantized weights, window by window.

The 16-bit model's last hidden states are kept on disk (2.4 MB a window), so that its logits cost one product with the
head; logits, softmax and KL are computed on them in float32. Inputs of linears are rounded as the format says.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

_ROWS_AT_ONCE = 64  # 64 x 49152 float32 is 12 MiB


class Evaluator:
    """One 16-bit model, in memory, whose weights are replaced by those of one checkpoint after another."""

    def __init__(self, model: Path, windows: list[list[int]], cache: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._head = self._model.get_output_embeddings().weight.detach().clone()
        self._windows, self._cache = windows, cache
        cache.mkdir(parents=True, exist_ok=True)

    @torch.inference_mode()
    def reference(self, index: int) -> dict[str, Any]:
        """The 16-bit model's own measures of window `index`."""
        return self._compare(index, self._reference_hidden(index))

    @torch.inference_mode()
    def measure(self, index: int, dense: Path, activations: str | None) -> dict[str, Any]:
        """Of window `index`: tokens scored, their summed NLL and KL(16-bit‖this) in nats, equal top-1 choices."""
        reference = self._reference_hidden(index)
        with self._weights_of(dense), self._rounded_inputs(activations):
            return self._compare(index, reference, self._hidden(index))

    def _hidden(self, index: int) -> Tensor:
        return self._model.model(torch.tensor([self._windows[index]]), use_cache=False).last_hidden_state[0]

    def _reference_hidden(self, index: int) -> Tensor:
        kept = self._cache / f"{index}.safetensors"
        if not kept.exists():
            save_file({"hidden": self._hidden(index)}, kept)
        return load_file(kept)["hidden"]

    def _compare(self, index: int, reference: Tensor, hidden: Tensor | None = None) -> dict[str, Any]:
        targets = torch.tensor(self._windows[index][1:])
        # The head is left in 16 bit by every quantizer here.
        sums = [
            _sums(*(None if h is None else F.linear(h[rows], self._head).float() for h in (reference, hidden)), ids)
            for rows, ids in zip(
                torch.arange(len(targets)).split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True
            )
        ]
        nll, kl, same = torch.tensor(sums, dtype=torch.float64).sum(0).tolist()
        return {"num_scored": len(targets), "nll": nll, "kl": kl, "same_top1": int(same)}

    @contextmanager
    def _weights_of(self, dense: Path) -> Iterator[None]:
        state = self._model.state_dict()
        changed = load_file(dense)
        originals = {name: state[name].clone() for name in changed}
        try:
            for name, tensor in changed.items():
                state[name].copy_(tensor)
            yield
        finally:
            for name, tensor in originals.items():
                state[name].copy_(tensor)

    @contextmanager
    def _rounded_inputs(self, activations: str | None) -> Iterator[None]:
        rounding = ROUNDING[activations] if activations else None
        linears = [m for m in self._model.model.modules() if isinstance(m, nn.Linear)] if rounding else []
        hooks = [module.register_forward_pre_hook(lambda _, args: (rounding(args[0]),)) for module in linears]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _sums(reference: Tensor, candidate: Tensor | None, targets: Tensor) -> tuple[float, float, float]:
    """Logits [n, vocab] float32, the ids that came next [n] -> summed NLL, KL(reference‖candidate), equal argmax."""
    own = reference if candidate is None else candidate
    normalizer = own.logsumexp(-1)
    nll = normalizer - own.gather(-1, targets[:, None])[:, 0]
    if candidate is None:
        return float(nll.sum()), 0.0, float(len(targets))
    log_z = reference.logsumexp(-1, keepdim=True)
    kl = ((reference - log_z).exp_() * (reference - candidate)).sum(-1) - log_z[:, 0] + normalizer
    same = reference.argmax(-1) == candidate.argmax(-1)
    return float(nll.sum()), float(kl.sum()), float(same.sum())


def _int8_per_token(x: Tensor) -> Tensor:
    """compressed-tensors' symmetric INT8: scale = max|x| / 127.5 of each token."""
    x32 = x.float()
    scale = x32.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / 127.5
    return ((x32 / scale).round_().clamp_(-128, 127) * scale).to(x.dtype)


def _fp8_per_token(x: Tensor) -> Tensor:
    """E4M3 with scale = max|x| / 448 of each token."""
    x32 = x.float()
    scale = x32.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / 448.0
    return ((x32 / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


ROUNDING: dict[str, Callable[[Tensor], Tensor]] = {"int8": _int8_per_token, "fp8": _fp8_per_token}
