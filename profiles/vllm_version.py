"""What differs between versions of vLLM in how it sizes its KV-cache."""

import re
from dataclasses import dataclass, fields
from typing import Any

from llmq.profiles.errors import InputError

_GIB = 2**30
_LARGE_BYTES, _LARGEST_BYTES = 70 * _GIB, 160 * _GIB  # from which the defaults grow; an A100 counts as small
_CHUNKED_FROM = 32_768  # tokens above which V0 computed a prompt in chunks unless told otherwise
_CHUNK = 2048


@dataclass(frozen=True)
class VllmVersion:
    """One version's habits.

    has_window_groups: layers with a window get block tables of their own, and hold a window only.
    mixes_pages: they do so too where they differ from the others in bytes a token.
    counts_graphs: CUDA graphs are estimated and taken off before the KV-cache is sized.
    tokens_of_longest: the size that it logs in tokens is that of requests of max_model_len, not the pool's slots.
    state_blocks: of a layer with a state, for one request (2: one is kept for prefix hits).
    batches: steps that may be under way at once, each with its tokens.
    """

    name: str
    is_v1: bool = False
    large_num_seqs: int = 256
    has_window_groups: bool = False
    mixes_pages: bool = False
    counts_graphs: bool = False
    tokens_of_longest: bool = False
    state_blocks: int = 1
    batches: int = 1
    utilization: float = 0.9

    @classmethod
    def parse(cls, text: str) -> "VllmVersion":
        """Of "0.11.0", "v0.11" or "0.11.1rc2". Raises InputError."""
        match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?[\w.+-]*", text.strip())
        if not match:
            raise InputError(f"--engine vllm@{text}: no version; write it as vllm@0.11.0")
        version = (int(match[1]), int(match[2]))
        habits: dict[str, Any] = {}
        for since, changed in _CHANGES:
            if version >= since:
                habits |= changed
        return cls(text.strip().removeprefix("v"), **habits)

    def batched_tokens(self, memory_bytes: int, gpu: str, max_model_len: int) -> int:
        """max_num_batched_tokens of `vllm serve` unless told otherwise."""
        if not self.is_v1:
            return _CHUNK if max_model_len > _CHUNKED_FROM else max(max_model_len, _CHUNK)
        if memory_bytes >= _LARGEST_BYTES:
            return 16_384 if self.batches > 1 else 8192
        return 8192 if _is_large(memory_bytes, gpu) else 2048

    def num_seqs(self, memory_bytes: int, gpu: str) -> int:
        """max_num_seqs of `vllm serve` unless told otherwise."""
        return self.large_num_seqs if _is_large(memory_bytes, gpu) else 256


def _is_large(memory_bytes: int, gpu: str) -> bool:
    return memory_bytes >= _LARGE_BYTES and "a100" not in gpu.lower()


# By minor version, read in vLLM's sources (0.32: v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, v1/worker/
# gpu_worker.py, engine/arg_utils.py) and its logs: 0.11 sizes gpt-oss by its windows (vllm#27508), 0.20 sizes Gemma 4
# as if it had none and 0.21 does not (vllm#43308), "default since v0.21.0" is what it logs of its graph estimate.
_CHANGES: tuple[tuple[tuple[int, int], dict[str, Any]], ...] = (
    ((0, 8), {"is_v1": True}),
    ((0, 9), {"large_num_seqs": 1024}),
    ((0, 10), {"has_window_groups": True}),
    ((0, 20), {"tokens_of_longest": True, "state_blocks": 2}),
    ((0, 21), {"mixes_pages": True, "counts_graphs": True}),
    ((0, 32), {"utilization": 0.92, "batches": 2}),
)
assert {key for _, changed in _CHANGES for key in changed} <= {one.name for one in fields(VllmVersion)}
