"""Qwen2.5-Coder-1.5B in float32 against transformers: biases of q, k and v, 6 heads to a KV head, a prompt with tools.

One model of 7 GB is in memory at a time.
"""

import gc
from pathlib import Path

import pytest
import torch
from engine_driver import Reference, greedy, run_all
from weather_tool import WEATHER

from llmq.profiles.machine import available_memory_bytes
from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.frontend.tokenizer import Tokenizer

pytestmark = pytest.mark.system

NUM_TOKENS = 6
CHUNK = 64


@pytest.fixture(scope="module")
def qwen25(cached_model) -> Path:
    folder = cached_model("qwen2.5-coder-1.5b")
    if available_memory_bytes() < 9 * 2**30:
        pytest.skip("9 GiB of memory are not free: float32 weights take 7")
    return folder


def test_logits_of_chunks_and_greedy_tokens_equal_transformers(qwen25):
    tokenizer = Tokenizer.from_folder(qwen25)
    prompts = [
        tokenizer.encode("def fibonacci(n):\n    "),
        tokenizer.encode("The capital of France is"),
        tokenizer.encode_chat([{"role": "user", "content": "How warm is it in Zürich?"}], tools=[WEATHER]),
    ]
    assert len(prompts[2]) > 2 * CHUNK
    engine = Engine.from_config(
        EngineConfig(
            model=str(qwen25),
            dtype="fp32",
            device="cpu",
            check_integrity=True,
            max_model_len=512,
            kv_cache_memory_bytes=100 * 2**20,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
        )
    )
    seen: dict[str, dict[int, torch.Tensor]] = {}
    engine.observe_logits(lambda name, at, rows: seen.setdefault(name, {}).setdefault(at, rows.clone()))
    made = run_all(engine, prompts, greedy(NUM_TOKENS, prompt_logprobs=0))
    assert engine.stats().num_steps >= 3 + NUM_TOKENS - 1  # the short ones decode between the chunks of the long one
    del engine
    gc.collect()

    reference = Reference(qwen25)
    for index, prompt in enumerate(prompts):
        ours = torch.cat([seen[str(index)][start] for start in sorted(seen[str(index)])])
        # One forward over the prompt and what the engine made of it: greedy where each token is the likeliest there.
        theirs = reference.logits([*prompt, *made[index].token_ids])
        assert theirs[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == made[index].token_ids
        theirs = theirs[: len(prompt) - 1]
        error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        print(f"{len(prompt)} tokens: relative error of the logits at most {float(error.max()):.1e}")
        assert float(error.max()) < 1e-4
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-4)
