"""A decoder whose linears are native, and steps of random tokens for any program."""

from collections.abc import Sequence
from pathlib import Path

import torch

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.linear import DenseLinear
from llmq.runtime.layers.native_linear import NativeLinear
from llmq.runtime.models.decoder import Decoder
from llmq.runtime.models.loader import make_loader
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import NewRequest, ScheduledRequest


def load_native(folder: Path, max_model_len: int = 256) -> Decoder:
    """In bfloat16. Raises where a linear is neither dense nor native."""
    decoder = make_loader(read_checkpoint(folder), torch.bfloat16, torch.device("cpu")).load(max_model_len)
    for block in decoder.blocks:
        for owner in [block.part, *getattr(block.part, "experts", [])]:
            for name in ("qkv", "o", "wide", "out", "router"):
                if isinstance(linear := getattr(owner, name, None), DenseLinear):
                    setattr(owner, name, NativeLinear(linear.weight, linear.bias))
    return decoder


def make_store(folder: Path, kv_dtype: str = "bf16", num_blocks: int = 64, in_tiles: bool = True) -> KVStore:
    layout = KVCacheLayout.of(read_checkpoint(folder).architecture, kv_dtype, block_tokens=16, dynamic_scales=True)
    return KVStore(layout, num_blocks, torch.device("cpu"), in_tiles=in_tiles)


def make_step(store: KVStore, prompts: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]]) -> BatchInputs:
    """Tokens spans[i] of each prompt as one step. Prompt i owns every len(prompts)-th block."""
    items, requests = [], []
    for index, (prompt, (start, end)) in enumerate(zip(prompts, spans, strict=True)):
        request = RunnerRequest(
            NewRequest(
                request_id=str(index),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                sampling_params=SamplingParams(),
                score_prompt=False,
            ),
            len(store.layout.groups),
        )
        used = 0
        for blocks, group in zip(request.block_ids, store.layout.groups, strict=True):
            count = -(-end // group.block_tokens)
            blocks += range(index + used * len(prompts), index + (used + count) * len(prompts), len(prompts))
            used += count
        requests.append(request)
        items.append(
            ScheduledRequest(
                request_id=str(index), num_computed_tokens=start, num_scheduled_tokens=end - start, samples=False
            )
        )
    return BatchInputs.build(items, requests, store.layout, store.staging)
