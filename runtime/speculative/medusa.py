"""MedusaDrafter: heads on the model's last hidden state, the n-th of which names the token n + 1 places on.

Cai et al. 2024 (arXiv 2401.10774): head n is w · (h + SiLU(W h + b)), with one or more such residual layers. Of the
tree that the paper builds of each head's likeliest tokens the likeliest chain is verified.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from llmq.profiles.errors import InputError
from llmq.runtime.batch import RunnerRequest
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest
from llmq.runtime.speculative.guesses import Draft, Guesser
from llmq.runtime.speculative.pass_price import PassPrice
from llmq.runtime.speculative.worth import TRIED_FOR, gain_of

FILE = "medusa_lm_head.safetensors"
_LAYER = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_HEAD = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.weight")


class MedusaHead:
    """Residual layers, (weight [hidden, hidden], bias [hidden] or None) each, and a matrix [words, hidden]."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor | None]], words: Tensor) -> None:
        self.layers, self.words = layers, words

    def __call__(self, hidden: Tensor) -> Tensor:
        """float32 logits [num_rows, words] of hidden states [num_rows, hidden]."""
        for weight, bias in self.layers:
            hidden = hidden + nn.functional.silu(nn.functional.linear(hidden, weight, bias))
        return nn.functional.linear(hidden, self.words).float()

    @property
    def num_bytes(self) -> int:
        tensors = [self.words, *(tensor for layer in self.layers for tensor in layer if tensor is not None)]
        return sum(tensor.nbytes for tensor in tensors)


def load_heads(
    folder: Path, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> list[MedusaHead]:
    """Of a folder as the authors publish it: `medusa_lm_head.safetensors` with n.layer.linear.weight,
    n.layer.linear.bias and n.layers.weight for head n. Raises InputError for heads of another model."""
    path = folder / FILE
    if not path.is_file():
        is_pickle = (folder / FILE).with_suffix(".pt").is_file()
        pickled = " (medusa_lm_head.pt is a pickle: save it as safetensors)" if is_pickle else ""
        raise InputError(f"--draft-model {folder}: there is no {FILE}{pickled}")
    with safe_open(path, framework="pt") as tensors:
        read = {name: tensors.get_tensor(name).to(device=device, dtype=dtype) for name in tensors.keys()}  # noqa: SIM118
    unknown = [name for name in read if not _LAYER.fullmatch(name) and not _HEAD.fullmatch(name)]
    if unknown:
        raise InputError(f"{path}: {unknown[0]} is no tensor of a Medusa head")
    heads = []
    while any(name.removeprefix("medusa_head.").startswith(f"{len(heads)}.") for name in read):
        heads.append(_head(path, len(heads), read, hidden_size, vocab_size))
    if not heads:
        raise InputError(f"{path} holds no head")
    return heads


def _head(path: Path, number: int, read: dict[str, Tensor], hidden_size: int, vocab_size: int) -> MedusaHead:
    layers: dict[int, dict[str, Tensor]] = {}
    words = None
    for name, tensor in read.items():
        if (found := _LAYER.fullmatch(name)) and int(found[1]) == number:
            layers.setdefault(int(found[2]), {})[found[3]] = tensor
        elif (found := _HEAD.fullmatch(name)) and int(found[1]) == number:
            words = tensor
    shapes = [layer["weight"].shape if "weight" in layer else None for layer in layers.values()]
    if words is None or words.shape[1] != hidden_size or any(shape != (hidden_size, hidden_size) for shape in shapes):
        raise InputError(f"{path}: head {number} is not of a model of {hidden_size} hidden features")
    if words.shape[0] > vocab_size:
        raise InputError(f"{path}: head {number} names {words.shape[0]} words, the model has {vocab_size}")
    return MedusaHead([(layers[index]["weight"], layers[index].get("bias")) for index in sorted(layers)], words)


class MedusaDrafter:
    """Needs no K and V: the hidden state that a request's last token was sampled from says all. Each head costs a
    product with a matrix as large as the model's own head, for all requests at once."""

    name = "Medusa heads"
    reads_hidden = "last"
    num_pooled = 0
    computes = True

    def __init__(self, heads: Sequence[MedusaHead], guesser: Guesser) -> None:
        self._heads, self._guesser = heads, guesser
        self._drafts: dict[str, Draft] = {}
        self._price = PassPrice()

    def forget(self, request_id: str) -> None:
        self._drafts.pop(request_id, None)

    def end_trial(self) -> None:
        self._guesser.unlearn()

    @torch.inference_mode()
    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        asked = []
        for item, request in zip(items, requests, strict=True):
            before = self._drafts.pop(request.request_id, None)
            if before is not None:
                self._guesser.learn(before.guess, request.token_ids)
            if item.max_draft_tokens:
                draft = self._guesser.begin(request, min(item.max_draft_tokens, len(self._heads)))
                self._drafts[request.request_id] = draft
                asked.append(draft)
        spent_s = self._guess(asked, terms)
        worth = iter(self._guesser.keep_worth(asked, terms, spent_s))
        return [next(worth) if request.request_id in self._drafts else [] for request in requests]

    def _guess(self, drafts: Sequence[Draft], terms: DraftTerms) -> float:
        """What it took."""
        began_s, current = self._price.clock(), drafts
        for head in self._heads:
            spent_s = self._price.clock() - began_s
            current = self._guesser.worth_more(current, self._price, terms, spent_s)
            if not current and head is self._heads[0] and drafts and terms.prices is not None:
                current = self._on_trial(drafts, terms)
            if not current or not self._price.fits(len(current), terms.most_s - spent_s):
                break
            with self._price.timed(len(current)):
                logits = head(torch.stack([draft.view.hidden[-1] for draft in current]))
                self._guesser.add(logits, current)
        return self._price.clock() - began_s

    def _on_trial(self, drafts: Sequence[Draft], terms: DraftTerms) -> list[Draft]:
        """Of guesses that are not known to pay one is tried, where they may by what is known."""
        gain = gain_of(len(drafts), self._guesser.hoped_chance, self._price, terms)
        may_pay = gain.gained_s > TRIED_FOR * terms.prices.plain_s
        if may_pay and self._price.seconds(1) <= terms.prices.spare_s:
            return [drafts[0]]
        if not may_pay:
            self._guesser.wait()
            self._price.wait()
        return []
