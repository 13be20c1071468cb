"""The engine on SmolLM2 in float32: token for token transformers' greedy `generate`, whatever the scheduling."""

import random

import pytest
import torch
from engine_driver import Reference, force_preemption, greedy, run_all
from tokenizers import Tokenizer

from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine

pytestmark = pytest.mark.system

NUM_TOKENS = 20
PROMPTS = [
    "Here is the English alphabet: ABC",
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "1 2 3 4 5 6",
    "🦙🦙🦙🦙🦙",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at",
    "SELECT name, age FROM",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "Q: What is the largest planet?\nA:",
    "日本語の文章です。",
    "The mitochondria is the",
    "List three colours:\n1.",
    "import numpy as np\n\n",
    "A long prompt that repeats itself. " * 12,
    "To be, or not to be, that is",
    "In 1969, Neil Armstrong",
    "x",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
]


@pytest.fixture(scope="module")
def prompts(smollm2):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2, prompts):
    reference = Reference(smollm2)
    torch.set_num_threads(2)
    return [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def make_engine(smollm2):
    def make(**changes):
        fields = {"max_model_len": 512, "dtype": "fp32", "device": "cpu", "check_integrity": True, **changes}
        return Engine.from_config(EngineConfig(model=str(smollm2), **fields))

    return make


def tokens(engine, prompts):
    return [made.token_ids for made in run_all(engine, prompts, greedy(NUM_TOKENS))]


def test_alone(make_engine, prompts, expected):
    assert tokens(make_engine(max_num_seqs=1), prompts) == expected


def test_sixteen_at_once_in_shuffled_order_and_again_with_the_prefix_cache_warm(make_engine, prompts, expected):
    order = list(range(len(prompts)))
    random.Random(3).shuffle(order)
    shuffled = [prompts[index] for index in order]
    engine = make_engine(max_num_seqs=16)
    for _ in ("cold", "warm"):
        assert tokens(engine, shuffled) == [expected[index] for index in order]
    assert engine.stats().prefix_cache_hits > 0


def test_chunks_of_32(make_engine, prompts, expected):
    assert tokens(make_engine(max_num_batched_tokens=32, max_num_seqs=16), prompts) == expected


def test_forced_preemption(make_engine, prompts, expected):
    block_bytes = 16 * 2 * 23_040
    engine = make_engine(kv_cache_memory_bytes=14 * block_bytes, max_model_len=128)
    force_preemption(engine)
    assert tokens(engine, prompts) == expected
    assert engine.stats().num_preemptions > 0


def test_bf16_serves_what_float32_does_where_it_is_sure(make_engine, prompts, expected):
    """bf16 rounds logits by about 1e-2: tokens may part only where the two best are closer than that."""
    engine = make_engine(dtype="auto")
    assert engine.info.fingerprint["dtype"] == "bf16"
    scored = run_all(engine, prompts, greedy(NUM_TOKENS, logprobs=2))
    for made, reference in zip(scored, expected, strict=True):
        for entry, token_id in zip(made.logprobs, reference, strict=True):
            if entry.token_id != token_id:
                assert entry.top[0][1] - entry.top[1][1] < 0.2
                break
