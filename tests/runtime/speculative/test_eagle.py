"""EAGLE's layer: read as published, its guesses against transformers' own layer, and without a trace in the text."""

import pytest
import torch
from drafters import everything, prompts
from engine_driver import Reference, force_preemption, greedy, run_all
from random_heads import save_head

from llmq.profiles.errors import InputError
from llmq.runtime.config import Speculation
from llmq.runtime.sampling_params import SamplingParams

HIDDEN = 64


def with_head(make_engine, folder, head, k: int = 4, *, adaptive: bool = False, **changes):
    speculation = Speculation(method="eagle", num_tokens=k, draft_model=str(head), adaptive=adaptive)
    return make_engine(folder, speculation=speculation, **changes)


class Naive:
    """The paper's recurrence over transformers' layer, without a cache."""

    def __init__(self, base, head) -> None:
        from safetensors.torch import load_file
        from transformers import AutoConfig, LlamaModel

        self.base = Reference(base).model
        tensors = load_file(head / "model.safetensors")
        config = AutoConfig.from_pretrained(head)
        config._attn_implementation = "eager"
        self.model = LlamaModel(config).eval()
        self.model.layers[0].input_layernorm = torch.nn.Identity()
        self.model.norm = torch.nn.Identity()
        self.model.load_state_dict({k: v for k, v in tensors.items() if k.startswith("layers.")}, strict=False)
        self.join, self.bias = tensors["fc.weight"], tensors.get("fc.bias")
        self.embedding = tensors.get("embed_tokens.weight", self.base.get_input_embeddings().weight)

    @torch.inference_mode()
    def guesses(self, token_ids: list[int], count: int) -> list[int]:
        hidden = self.base.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        tokens, made = list(token_ids), []
        for _ in range(count):
            pairs = torch.cat([self.embedding[torch.tensor(tokens[1:])], hidden], dim=-1)
            joined = torch.nn.functional.linear(pairs, self.join, self.bias)
            last = self.model(inputs_embeds=joined[None]).last_hidden_state[0, -1]
            made.append(int(self.base.lm_head(last).argmax()))
            tokens.append(made[-1])
            hidden = torch.cat([hidden, last[None]])
        return made


def recorded(engine) -> list[tuple[list[int], list[int]]]:
    """(text, what was guessed to follow) of every proposal from now on."""
    drafter, seen = engine.executor.runner.drafter, []
    propose = drafter.propose

    def watch(items, requests, terms):
        drafts = propose(items, requests, terms)
        for item, request, draft in zip(items, requests, drafts, strict=True):
            if item.max_draft_tokens:
                seen.append((list(request.token_ids), draft))
        return drafts

    drafter.propose = watch
    return seen


@pytest.mark.parametrize("parts", [{}, {"own_embedding": True, "bias": True}, {"num_key_value_heads": 1}], ids=repr)
def test_it_guesses_what_the_paper_says(tiny_llama, make_engine, tmp_path, parts):
    folder = tiny_llama()
    head = save_head(tmp_path / "head", folder, **parts)
    engine = with_head(make_engine, folder, head, max_num_batched_tokens=16, max_num_seqs=4)
    seen, naive = recorded(engine), Naive(folder, head)
    run_all(engine, prompts(4, 40), greedy(12))
    assert len(seen) > 30
    assert {len(draft) for _, draft in seen} >= {1, 4}
    for text, draft in seen:
        assert draft == naive.guesses(text, len(draft))


@pytest.mark.parametrize(
    "params", [greedy(24), SamplingParams(temperature=1.0, seed=5, max_tokens=24)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("parts", [{}, {"num_key_value_heads": 1, "head_dim": 32}], ids=repr)
def test_a_random_head_changes_no_token(tiny_llama, make_engine, tmp_path, params, parts):
    folder, given = tiny_llama(), prompts(10, 60)
    head = save_head(tmp_path / "head", folder, **parts)
    plain = run_all(make_engine(folder), given, params)
    for changes in ({}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}, {"kv_dtype": "fp32"}):
        engine = with_head(make_engine, folder, head, **changes)
        for _ in ("cold", "from the prefix cache"):
            assert everything(run_all(engine, given, params)) == everything(plain)
        assert engine.stats().draft_tokens > 0


def test_preemption_and_adaptive_guesses_change_no_token(tiny_llama, make_engine, tmp_path):
    folder, given = tiny_llama(), prompts(8)
    head = save_head(tmp_path / "head", folder)
    plain = run_all(make_engine(folder), given, greedy(60))
    engine = with_head(make_engine, folder, head, 8, kv_cache_memory_bytes=150 * 1024, max_model_len=96)
    force_preemption(engine)
    assert everything(run_all(engine, given, greedy(60))) == everything(plain)
    assert engine.stats().num_preemptions > 0
    adaptive = with_head(make_engine, folder, head, 8, adaptive=True)
    assert everything(run_all(adaptive, given, greedy(60))) == everything(plain)


def test_a_head_of_another_model_is_refused(tiny_llama, make_engine, tmp_path):
    folder = tiny_llama()
    head = save_head(tmp_path / "head", tiny_llama(hidden_size=32, head_dim=16))
    with pytest.raises(InputError, match="of a model of 32 hidden features and 512 words; this one has 64 and 512"):
        with_head(make_engine, folder, head)
    with pytest.raises(InputError, match=r"there is no fc.weight, so this is no EAGLE head"):
        with_head(make_engine, folder, folder)
