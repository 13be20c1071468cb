"""An engine compared with transformers: every logit, and greedy tokens under schedules."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from engine_driver import Reference, greedy, run_all

from llmq.runtime.engine import Engine

SCHEDULES = ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 8})


def _prompts(count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 512) for _ in range(rng.randint(longest // 2, longest))] for _ in range(count)]


def check_against_transformers(folder: Path, make_engine: Callable[..., Engine]) -> None:
    """Greedy tokens and the logits of every position, prompt and generated, in one piece, in chunks and one by one."""
    given, reference = _prompts(4), Reference(folder)
    expected = [reference.greedy(prompt, 24) for prompt in given]
    logits = [reference.logits(prompt + made) for prompt, made in zip(given, expected, strict=True)]
    for changes in SCHEDULES:
        engine, seen = make_engine(folder, **changes), {}
        engine.observe_logits(lambda name, at, rows, seen=seen: seen.setdefault(name, {}).setdefault(at, rows.clone()))
        for made, tokens, wanted in zip(
            run_all(engine, given, greedy(24, prompt_logprobs=0, logprobs=0)), expected, logits, strict=True
        ):
            assert made.token_ids == tokens
            generated = wanted.log_softmax(-1)[-len(tokens) - 1 : -1].max(dim=-1).values
            torch.testing.assert_close(
                torch.tensor([entry.logprob for entry in made.logprobs]), generated, rtol=0, atol=1e-4
            )
        for name, chunks in seen.items():
            made = torch.cat([chunks[start] for start in sorted(chunks)])
            torch.testing.assert_close(made, logits[int(name)][: len(made)], rtol=1e-4, atol=1e-4)
        # Again over a warm prefix cache.
        assert [made.token_ids for made in run_all(engine, given, greedy(24))] == expected
