"""How the engines of an evaluation compute. No torch: a verb checks it before anything is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Numerics:
    """In the words of EngineConfig, of which it is the part that a user of `llmq eval` chooses."""

    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    head: str = "auto"
    activations: str = "auto"
    threads: int | None = None
    batch_invariant: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
