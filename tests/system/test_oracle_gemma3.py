"""Gemma-3-270M in float32 against transformers: windows of 512 on five of six layers, 262,144 words."""

import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from engine_driver import Reference, greedy, run_all
from tokenizers import Tokenizer

from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def gemma3(cached_model) -> Path:
    return cached_model("gemma3-270m")


def test_logits_and_tokens_equal_transformers_beyond_the_window(gemma3):
    tokenizer = Tokenizer.from_file(str(gemma3 / "tokenizer.json"))
    words = pydoc_data.topics.topics["specialnames"]
    prompts = [tokenizer.encode("The capital of France is").ids, tokenizer.encode(words).ids[:700]]
    assert len(prompts[1]) == 700
    engine = Engine.from_config(
        EngineConfig(
            model=str(gemma3),
            dtype="fp32",
            device="cpu",
            check_integrity=True,
            max_model_len=1024,
            kv_cache_memory_bytes=200 * 2**20,
            max_num_batched_tokens=256,
            max_num_seqs=4,
        )
    )
    assert [group.spec.window for group in engine.executor.runner.store.layout.groups] == [512, None]
    seen = {}
    engine.observe_logits(lambda name, at, rows: seen.setdefault(name, {}).setdefault(at, rows.clone()))
    made = run_all(engine, prompts, greedy(12, prompt_logprobs=0))
    del engine
    reference = Reference(gemma3)
    for index, prompt in enumerate(prompts):
        chunks = seen[str(index)]
        ours = torch.cat([chunks[start] for start in sorted(chunks)])
        torch.testing.assert_close(ours, reference.logits(prompt)[:-1], rtol=1e-4, atol=2e-4)
        assert made[index].token_ids == reference.greedy(prompt, 12)
