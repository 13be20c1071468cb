"""What vLLM's memory holds beside its KV-cache, as intervals, each with the kind of evidence that it rests on.

Logged figures behind the constants, in GiB (weights are left out):

| engine, model, GPU | tokens, sequences | activations | not torch's | source |
|---|---|---|---|---|
| 0.6, Llama-3.1-8B, RTX 3090 | 20,000, 256 | 2.07 | 0.35 | vllm#10517 |
| 0.6, Llama-3.1-8B, RTX 3090 | 29,000, 256 | 2.99 | 0.35 | vllm#10517 |
| December 2024, Llama-3-8B, H100, tp 1 and 2 | 8192, 256 | 1.26 | 1.79, 3.58 | vllm PR 10511 |
| 0.7, R1-Distill-Qwen-14B, RTX 4090, tp 2 | 2048, 256 | 0.19 + 1.22 of sampling | 0.25 | vllm#13061 |
| 0.11, Llama-3.1-8B, H100 | 8192, 1024 | 4.76 | 0.13 | llm-d-benchmark |
| 0.11, Llama-3.3-70B FP8, H100, tp 2 | 8192, 1024 | 4.84 | 0.55 | llm-d-benchmark |
| 0.11, Qwen3-0.6B, H100 | 8192, 1024 | 5.56 | 0.13 | llm-d-benchmark |
| 0.11, Qwen3-32B, H100, tp 1 and 2 | 8192, 1024 | 5.64 | 0.14, 0.54 | llm-d-benchmark |
| 0.11, gpt-oss-20b and 120b, H100 | 8192, 1024 | 7.38 | 0.13 | llm-d-benchmark |

llm-d-benchmark: config_explorer/empirical-vllm-memory-results.md at 2593348 in llm-d/llm-d-benchmark.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.step_memory import mlp_width
from llmq.profiles.vllm_version import VllmVersion

_GIB = 2**30
DRIVER, PADDING, ROTARY_TABLE = "what drivers differ in", "padding of MXFP4 kernels", "rotary table"
NOT_TORCH = "not torch's (CUDA, NCCL)"


class Evidence(Enum):
    """What a number rests on, the surest first."""

    EXACT = "exact"  # shapes and sizes as they are stored
    REPRODUCED = "reproduced"  # a law that gives what was logged on several models
    CALIBRATED = "calibrated"  # of a start-up log of the user's own
    PRIOR = "prior"  # the range that was logged elsewhere

    @property
    def rank(self) -> int:
        return list(Evidence).index(self)


@dataclass(frozen=True)
class Overhead:
    """Bytes of one rank, an interval. `how`: where they are from, for the user."""

    name: str
    low: float
    expected: float
    high: float
    evidence: Evidence
    how: str

    def scaled(self, factor: float, **changes: Any) -> "Overhead":
        return replace(self, low=self.low * factor, expected=self.expected * factor, high=self.high * factor, **changes)


@dataclass(frozen=True)
class StepShape:
    """What the profiling step of an engine computes."""

    num_tokens: int  # max_num_batched_tokens
    num_seqs: int  # max_num_seqs
    ranks: int = 1


# The law of activations, and how far it may be off: it gives all rows above within 1.5 %, whose models are alike.
_SAMPLER_COPIES = 9.56  # logits in float32, [sequences, vocabulary], so many times: sorted, softmaxed, cumulated
_RESIDUAL_COPIES = 1.28  # [tokens, hidden] in 16 bit, held meanwhile
_MLP_COPIES = 3.0  # [tokens, intermediate / ranks + hidden] in 16 bit, the widest moment of a layer
_ACTIVATIONS_OFF = 0.05
_WEIGHTS_OFF = 0.003  # norms that each rank has, padded vocabularies


def overheads(
    architecture: ModelArchitecture,
    config: dict[str, Any],
    version: VllmVersion,
    weight_bytes: int,
    step: StepShape,
    how: str = "by config.json",
) -> tuple[Overhead, ...]:
    """All rows of one rank. `weight_bytes`: of one rank, known as `how` says."""
    return (
        _DRIVER,
        Overhead(
            *("weights", weight_bytes, weight_bytes, weight_bytes * (1 + _WEIGHTS_OFF)),
            *(Evidence.EXACT, f"{how}, and up to 0.3 % for what each rank has whole"),
        ),
        *_padding(config, weight_bytes),
        _rotary_table(architecture, config),
        _activations(architecture, config, step),
        _not_torch(version, step.ranks),
        *((_GRAPHS,) if version.counts_graphs else ()),
    )


def _padding(config: dict[str, Any], weight_bytes: int) -> tuple[Overhead, ...]:
    if (config.get("quantization_config") or {}).get("quant_method") != "mxfp4":
        return ()
    row = Overhead(PADDING, 0, 0.053, 0.07, Evidence.PRIOR, "gpt-oss: 4.9 and 5.6 % of the weights")
    return (row.scaled(weight_bytes),)


def _rotary_table(architecture: ModelArchitecture, config: dict[str, Any]) -> Overhead:
    """cos and sin of each position that the model has, in 16 bit."""
    merged = {**config, **(config.get("text_config") or {})}
    width = merged.get("qk_rope_head_dim") or architecture.head_dim
    num_bytes = 2 * architecture.max_position_embeddings * width
    return Overhead(
        ROTARY_TABLE, num_bytes, num_bytes, num_bytes, Evidence.REPRODUCED, "cos and sin of each position, 16 bit"
    )


def _activations(architecture: ModelArchitecture, config: dict[str, Any], step: StepShape) -> Overhead:
    """The wider of two moments: inside an MLP, and when tokens are drawn (on every rank)."""
    hidden, tokens = architecture.hidden_size, step.num_tokens
    mlp = _MLP_COPIES * tokens * (mlp_width(architecture, config) / step.ranks + hidden) * 2
    sampler = _SAMPLER_COPIES * step.num_seqs * architecture.vocab_size * 4 + _RESIDUAL_COPIES * tokens * hidden * 2
    expected, is_sampler = max(mlp, sampler), sampler >= mlp
    how = f"{step.num_seqs:,} rows of logits when tokens are drawn" if is_sampler else f"the MLP of {tokens:,} tokens"
    row = Overhead(
        "activations",
        expected * (1 - _ACTIVATIONS_OFF),
        expected,
        expected * (1 + _ACTIVATIONS_OFF),
        Evidence.REPRODUCED,
        how,
    )
    if "vision_config" in config or "audio_config" in config:
        return replace(
            row,
            low=0.4 * expected,
            high=expected + 4 * _GIB,
            evidence=Evidence.PRIOR,
            how=f"{how}; what its encoder's profiling run takes is not known: 2 GiB in one, 36 in another",
        )
    if not is_sampler and (architecture.family is None or architecture.family.experts):
        return replace(row, high=3 * expected, evidence=Evidence.PRIOR, how=f"{how}, by experts: few logs")
    return row


def _not_torch(version: VllmVersion, ranks: int) -> Overhead:
    """The context of CUDA beyond the first, libraries' workspaces, NCCL's buffers."""
    if ranks == 1:
        low, expected, high = (0.1, 0.14, 0.4) if version.is_v1 else (0.1, 0.35, 1.9)
        how = "one rank: 0.13 to 0.35 GiB logged, 1.79 by a version of December 2024"
    else:
        low, expected, high = (0.2, 0.55, 2.0) if version.is_v1 else (0.2, 0.55, 3.6)
        how = "several ranks: 0.20 to 0.55 GiB logged, 3.58 by a version of December 2024"
    return Overhead(NOT_TORCH, low, expected, high, Evidence.PRIOR, how).scaled(_GIB)


_DRIVER = Overhead(
    *(DRIVER, -0.1, 0, 0.1, Evidence.REPRODUCED),
    "H100: 79.11 to 79.22 GiB logged, A100: 79.15 to 79.25",
).scaled(_GIB)
_GRAPHS = Overhead(
    "CUDA graphs", 0, 0.5, 1.5, Evidence.PRIOR, "estimated before the KV-cache since 0.21; up to 1.03 GiB logged"
).scaled(_GIB)
