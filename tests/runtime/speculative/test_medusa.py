"""Medusa heads: read as published, aligned with the tokens that they name, and without a trace in the text."""

import pytest
import torch
from drafters import everything, prompts, use
from engine_driver import greedy, run_all
from random_heads import HEADS, HIDDEN, VOCAB, random_heads, save_heads

from llmq.profiles.errors import InputError
from llmq.runtime.config import Speculation
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.speculative.medusa import load_heads


def with_heads(make_engine, folder, heads, **changes):
    speculation = Speculation(method="medusa", num_tokens=4, draft_model=str(heads))
    return make_engine(folder, speculation=speculation, **changes)


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_heads_compute_what_the_paper_says(tmp_path, num_layers):
    tensors = random_heads(num_layers)
    save_heads(tmp_path, {f"medusa_head.{name}": tensor for name, tensor in tensors.items()})
    heads = load_heads(tmp_path, HIDDEN, VOCAB, torch.float32, torch.device("cpu"))
    assert len(heads) == HEADS
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for number, head in enumerate(heads):
        expected = rows.double()
        for layer in range(num_layers):
            weight, bias = (tensors[f"{number}.{layer}.linear.{part}"].double() for part in ("weight", "bias"))
            inner = expected @ weight.T + bias
            expected = expected + inner * torch.sigmoid(inner)
        expected = expected @ tensors[f"{number}.{num_layers}.weight"].double().T
        torch.testing.assert_close(head(rows).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "params", [greedy(24), SamplingParams(temperature=1.0, seed=5, max_tokens=24)], ids=["greedy", "sampled"]
)
def test_random_heads_change_no_token(tiny_llama, make_engine, tmp_path, params):
    folder, given = tiny_llama(), prompts(12)
    save_heads(tmp_path, random_heads())
    plain = run_all(make_engine(folder), given, params)
    for changes in ({}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}):
        engine = with_heads(make_engine, folder, tmp_path, **changes)
        assert everything(run_all(engine, given, params)) == everything(plain)
        assert engine.stats().draft_tokens > 0


class Watcher:
    """Guesses nothing, and notes which hidden state each token was sampled from."""

    name, reads_hidden, num_pooled = "watcher", "last", 0

    def __init__(self) -> None:
        self.seen: dict[str, list[torch.Tensor]] = {}

    def propose(self, items, requests, terms):
        for item, request in zip(items, requests, strict=True):
            if item.samples:
                self.seen.setdefault(request.request_id, []).append(request.hidden[-1].clone())
        return [[] for _ in items]

    def forget(self, request_id: str) -> None:
        pass


def test_heads_that_were_fitted_to_the_texts_are_right(tiny_llama, make_engine, tmp_path):
    """Least squares from hidden states to the token n + 1 places on: by one place off they would be wrong."""
    folder, given = tiny_llama(), prompts(4)
    watcher = Watcher()
    engine = make_engine(folder, speculation=Speculation(method="ngram", num_tokens=1))
    plain = run_all(use(engine, watcher), given, greedy(20))
    tensors = {}
    for head in range(2):
        hidden, named = [], []
        for index, one in enumerate(plain):
            rows = watcher.seen[str(index)]
            hidden += rows[: len(one.token_ids) - 1 - head]
            named += one.token_ids[1 + head :][: len(rows)]
        count = min(len(hidden), len(named))
        target = torch.nn.functional.one_hot(torch.tensor(named[:count]), VOCAB).double()
        words = torch.linalg.lstsq(torch.stack(hidden[:count]).double(), target, driver="gelsd").solution.T
        tensors |= {f"{head}.0.linear.weight": torch.zeros(HIDDEN, HIDDEN), f"{head}.1.weight": words.float()}
    save_heads(tmp_path, tensors)
    engine = with_heads(make_engine, folder, tmp_path)
    assert everything(run_all(engine, given, greedy(20))) == everything(plain)
    stats = engine.stats()
    assert stats.accepted_draft_tokens > 0.8 * stats.draft_tokens > 0


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"0.0.linear.weight": torch.zeros(8, 8), "0.1.weight": torch.zeros(VOCAB, 8)},
            "head 0 is not of a model of 64",
        ),
        ({"0.0.weight": torch.zeros(VOCAB + 1, HIDDEN)}, "head 0 names 513 words, the model has 512"),
        ({"fc.weight": torch.zeros(8, 8)}, "fc.weight is no tensor of a Medusa head"),
        ({"1.0.weight": torch.zeros(VOCAB, HIDDEN)}, "holds no head"),
    ],
)
def test_heads_of_another_model_are_refused(tmp_path, tensors, message):
    save_heads(tmp_path, tensors)
    with pytest.raises(InputError, match=message):
        load_heads(tmp_path, HIDDEN, VOCAB, torch.float32, torch.device("cpu"))


def test_a_folder_without_heads_is_refused(tmp_path):
    (tmp_path / "medusa_lm_head.pt").touch()
    with pytest.raises(InputError, match=r"there is no medusa_lm_head.safetensors \(medusa_lm_head.pt is a pickle"):
        load_heads(tmp_path, HIDDEN, VOCAB, torch.float32, torch.device("cpu"))
