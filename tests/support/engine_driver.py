"""Drives an Engine in this process, and computes the same with transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from llmq.runtime.engine import Engine
from llmq.runtime.request import EngineRequest, RequestOutput
from llmq.runtime.sampling_params import SamplingParams


@dataclass
class Collected:
    """All outputs of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = output.num_cached_tokens
        self.error = output.error


def run_all(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]):
    """Add all prompts at once, step until done, check the pool, return a Collected for each prompt."""
    per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    collected = [Collected() for _ in prompts]
    for index, (prompt, own) in enumerate(zip(prompts, per_prompt, strict=True)):
        engine.add_request(
            EngineRequest(
                request_id=str(index), prompt_token_ids=list(prompt), sampling_params=own, arrival_time_s=index
            )
        )
    for _ in range(100_000):
        if not engine.has_unfinished_requests:
            break
        for output in engine.step():
            collected[int(output.request_id)].add(output)
    assert not engine.has_unfinished_requests
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return collected


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


class Reference:
    """transformers' own forward and greedy generate, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        # Eager attention is the definition; others leave a softcap out.
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        output = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[num_tokens, vocab_size]: row i predicts token i + 1."""
        return self.model(torch.tensor([list(token_ids)])).logits[0].float()

    def log_probs(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.log_softmax(self.logits(token_ids), dim=-1)


def force_preemption(engine: Engine) -> None:
    """Let it admit whatever fits now, however much it may grow: a small pool then runs dry."""
    kv = engine.scheduler.kv
    engine.scheduler.admission.has_room = lambda request, hit, running: (
        kv.blocks_to_admit(request, hit) <= kv.pool.num_free_blocks
    )
