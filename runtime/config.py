"""EngineConfig: read once at the edge, frozen, sent whole to the engine's process."""

from typing import Literal

import msgspec

from llmq.profiles.slo import Slo


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are guessed, to be verified several at once."""

    method: Literal["ngram", "draft", "eagle", "medusa"]
    # Who guesses with "draft": a resolved local folder, or so many first layers of the model itself. The others but
    # "ngram" have a folder.
    draft_model: str | None = None
    draft_layers: int | None = None
    num_tokens: int = 4  # guessed at most, for each request and step
    pool_tokens: int = 0  # of "ngram": of finished requests' answers, kept to guess others by
    adaptive: bool = False  # only those that are worth their time: see `speculative.policy`


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is started with. `model` is a resolved local folder. None means: decided at start, and said."""

    model: str
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # auto: the checkpoint's own
    kv_dtype: Literal["auto", "bf16", "fp16", "fp32", "int8", "fp8", "int4"] = "auto"  # auto: see `numerics`
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "torch", "native", "triton"] = "auto"  # auto: native on a CPU, triton on a GPU: `dtypes`
    head: Literal["auto", "16bit", "int8"] = "auto"  # of a head stored in 16 bit, by native kernels: see `dtypes`
    activations: Literal["auto", "exact", "int8"] = "auto"  # what integers multiply, by native kernels: likewise
    enforce_eager: bool = False  # on a GPU: no CUDA graphs
    overlap_steps: bool | None = None  # schedule the next step while one is computed; None: on a GPU, where it can be
    block_tokens: int = 16
    max_model_len: int | None = None  # None: the model's own context, or what the KV-cache holds if that is less
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float | None = None  # of a GPU, instead of kv_cache_memory_bytes; None: memory.GPU_SHARE
    enable_prefix_caching: bool = True
    batch_invariant: bool = False  # bit for bit the same for a request, whatever else a step computes; slower
    slo: Slo | None = None  # of ttft and tpot: kept by small enough steps and by shedding; see `policy.SloPolicy`
    speculation: Speculation | None = None
    tensor_parallel: int = 1  # ranks that share each layer, a process each
    pipeline_parallel: int = 1  # stages of some layers each, of `tensor_parallel` ranks
    threads: int | None = None  # of all ranks together
    seed: int = 0  # of requests that bring none
    check_integrity: bool = False  # verify the block pool's invariants after every step

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def why_no_overlap(self) -> str | None:
        """What has to know a step's tokens before the next one is scheduled; None: nothing."""
        if self.speculation is not None:
            return "--speculative guesses by a step's tokens before the next one"
        if self.slo is not None:
            return "--slo times steps one by one"
        if self.num_ranks > 1:
            return "the first of several ranks tells the others what it sampled"
        return None

    @property
    def ways(self) -> dict[str, int]:
        """How the model is split, by the options that ask for it."""
        return {"--tp": self.tensor_parallel, "--pp": self.pipeline_parallel}
