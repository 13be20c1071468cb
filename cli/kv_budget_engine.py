"""`llmq kv-budget --engine vllm@VERSION`: the pool that another engine will allocate, and what each number rests on."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.cli import console
from llmq.profiles.errors import InputError
from llmq.profiles.units import format_bytes

if TYPE_CHECKING:
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.engine_budget import EngineBudget, Interval
    from llmq.profiles.engine_overheads import Overhead
    from llmq.profiles.vllm_version import VllmVersion
    from llmq.profiles.weight_size import WeightSize

_KV_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8": 8}


@dataclass(frozen=True)
class EngineQuestion:
    """What is asked of another engine; None: as it decides itself."""

    version: "VllmVersion"
    memory_name: str
    memory_bytes: int
    utilization: float | None
    max_model_len: int
    ranks: int
    kv_dtype: str
    block_tokens: int
    num_tokens: int | None  # max_num_batched_tokens
    num_seqs: int | None  # max_num_seqs
    calibrate: str | None

    def answer(
        self, architecture: "ModelArchitecture", config: dict[str, Any], weights: "WeightSize"
    ) -> "EngineBudget":
        """`weights`: of all ranks. Raises InputError for what the engine does not do, or another's log."""
        from llmq.profiles.engine_budget import EngineBudget
        from llmq.profiles.engine_overheads import StepShape, overheads
        from llmq.profiles.vllm_log import VllmLog, calibrated
        from llmq.profiles.vllm_pool import VllmPool

        if self.kv_dtype not in _KV_BITS:
            raise InputError(f"--kv-dtype {self.kv_dtype}: vLLM's KV-cache is one of auto, {', '.join(_KV_BITS)}")
        version = self.version
        log = VllmLog.read(Path(self.calibrate)) if self.calibrate else None
        if log and log.ranks not in (None, self.ranks):
            raise InputError(f"--calibrate {self.calibrate}: it is of --tp {log.ranks}, and this asks for {self.ranks}")
        memory_bytes = round(log.memory_bytes) if log and log.memory_bytes else self.memory_bytes

        def rows(
            max_model_len: int, num_tokens: int | None, num_seqs: int | None
        ) -> tuple[tuple["Overhead", ...], StepShape]:
            num_tokens = num_tokens or version.batched_tokens(memory_bytes, self.memory_name, max_model_len)
            num_seqs = num_seqs or version.num_seqs(memory_bytes, self.memory_name)
            step = StepShape(num_tokens, num_seqs, self.ranks)
            return overheads(
                architecture, config, version, -(-weights.num_bytes // self.ranks), step, weights.how
            ), step

        found, step = rows(self.max_model_len, self.num_tokens, self.num_seqs)
        utilization = self.utilization or version.utilization
        if log:
            of_log, _ = rows(
                log.max_model_len or self.max_model_len,
                log.num_tokens or self.num_tokens,
                log.num_seqs or self.num_seqs,
            )
            found = calibrated(found, of_log, log, memory_bytes * (log.utilization or utilization))
        pool = VllmPool.of(
            architecture,
            version,
            kv_bits=_KV_BITS[self.kv_dtype],
            ranks=self.ranks,
            step_tokens=step.num_tokens * version.batches,
            block_tokens=self.block_tokens,
        )
        return EngineBudget(self.memory_name, memory_bytes, utilization, found, pool, self.max_model_len, step)


def parse_engine(text: str) -> "VllmVersion | None":
    """The version of "vllm@0.11.0"; None for llmq itself. Raises InputError for any other engine."""
    from llmq.profiles.vllm_version import VllmVersion

    name, _, version = text.partition("@")
    if text == "llmq":
        return None
    if name != "vllm" or not version:
        raise InputError(f"--engine {text}: llmq, or vLLM with its version, as vllm@0.11.0")
    return VllmVersion.parse(version)


def print_engine_budget(model: str, question: EngineQuestion, budget: "EngineBudget") -> None:
    """The table, the verdict and remarks, to stdout."""
    needed = budget.pool.blocks_for(budget.max_model_len)
    console.heading(
        f"{model} in vLLM {question.version.name} with --tp {question.ranks} on {question.memory_name}: "
        f"KV-cache in {question.kv_dtype}, max_model_len {budget.max_model_len:,}, "
        f"max_num_batched_tokens {budget.step.num_tokens:,}, max_num_seqs {budget.step.num_seqs:,}"
    )
    requested, kv, blocks, tokens, at_once = (
        budget.requested_bytes, budget.kv_bytes, budget.num_blocks, budget.logged_tokens, budget.concurrency,
    )  # fmt: skip
    table = [
        [f"{budget.utilization:g} of {_gib(budget.memory_bytes)}", "", _gib(requested), "", "exact"],
        *(["- " + row.name, *_sizes(row.low, row.expected, row.high), row.evidence.value] for row in budget.rows),
        [],
        ["KV-cache of a rank", *_sizes(kv.low, kv.expected, kv.high), ""],
        [f"blocks of {format_bytes(budget.pool.block_bytes)}", *_counts(blocks), ""],
        ["tokens, as it logs them", *_counts(tokens), ""],
        [f"requests of {budget.max_model_len:,} at once", *(f"{one:,.2f}" for one in _three(at_once)), ""],
    ]
    console.print_table(None, ["", ">least", ">expected", ">most", "evidence"], table)
    console.heading(
        f"{budget.fit.value}: a request of {budget.max_model_len:,} tokens takes {needed:,} blocks "
        f"({format_bytes(needed * budget.pool.block_bytes)})"
    )
    console.print_notes(_notes(question, budget))


def _sizes(*sizes: float) -> list[str]:
    return [_gib(one) for one in sizes]


def _gib(num_bytes: float) -> str:
    """With two places, as the engine's log has it."""
    return f"{num_bytes / 2**30:,.2f} GiB"


def _three(interval: "Interval") -> tuple[float, float, float]:
    return interval.low, interval.expected, interval.high


def _counts(interval: "Interval") -> list[str]:
    return [f"{one:,.0f}" for one in _three(interval)]


def _notes(question: EngineQuestion, budget: "EngineBudget") -> list[str]:
    from llmq.profiles.engine_budget import Fit

    notes = [f"{row.name}: {row.how}." for row in budget.rows]
    notes.append("Bounds add up: as if all rows were at their worst, or at their best, at once.")
    if budget.fit is Fit.UNKNOWN and not question.calibrate:
        notes.append("One start-up log of this engine on this GPU decides it: --calibrate vllm.log.")
    elif budget.fit is Fit.DOES_NOT_FIT:
        notes.append("A shorter --ctx, more ranks (--tp), --kv-dtype fp8, fewer bits (--weights w4) or --max-num-seqs.")
    return notes


def print_engine_json(model: str, question: EngineQuestion, budget: "EngineBudget") -> None:
    console.print_json(_as_json(model, question, budget))


def _as_json(model: str, question: EngineQuestion, budget: "EngineBudget") -> dict[str, Any]:
    pool = budget.pool
    return {
        "model": model,
        "engine": f"vllm@{question.version.name}",
        "kv_dtype": question.kv_dtype,
        "tensor_parallel": question.ranks,
        "memory": {"name": budget.memory_name, "bytes": budget.memory_bytes, "utilization": budget.utilization},
        "max_model_len": budget.max_model_len,
        "max_num_batched_tokens": budget.step.num_tokens,
        "max_num_seqs": budget.step.num_seqs,
        "overheads": [
            {
                "name": row.name,
                "low_bytes": round(row.low),
                "expected_bytes": round(row.expected),
                "high_bytes": round(row.high),
                "evidence": row.evidence.value,
                "how": row.how,
            }
            for row in budget.rows
        ],
        "block_bytes": pool.block_bytes,
        "blocks_of_a_request": pool.blocks_for(budget.max_model_len),
        **{
            name: dict(zip(("low", "expected", "high"), (round(one, 3) for one in _three(interval)), strict=True))
            for name, interval in (
                ("kv_bytes", budget.kv_bytes),
                ("blocks", budget.num_blocks),
                ("tokens", budget.logged_tokens),
                ("concurrency", budget.concurrency),
            )
        },
        "verdict": budget.fit.value,
    }
