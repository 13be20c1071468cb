"""`llmq kv-budget`: how many tokens and sequences fit, from config.json alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.profiles.errors import InputError
from llmq.profiles.units import format_bytes, format_bytes_exact, parse_bytes, parse_tokens

if TYPE_CHECKING:
    from llmq.profiles.budget import Budget, Memory

app = typer.Typer(add_completion=False)


@app.command()
def kv_budget(
    model: Annotated[str, typer.Argument(help="Folder, config.json, .gguf file, hub id, or smollm2-135m.")],
    ctx: Annotated[str | None, typer.Option(help="Tokens of a sequence: 8192, 256k (k = 1024).")] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU by name (h100), or auto: this machine.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a rank, all of it used: 80GiB, 80GB.")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Memory for KV blocks alone, as in serve.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of the GPU that is used.  [default: 0.9]", show_default=False)
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32, fp8, int8 or int4.")] = "auto",
    kv_scales: Annotated[str, typer.Option(help="Scales of a quantized KV-cache: auto, static, dynamic.")] = "auto",
    weights: Annotated[str | None, typer.Option(help="bf16, fp8, int8, w4, w4g64, or bytes: 40GiB.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How many tokens and sequences fit in a memory, from config.json alone: no weights, no GPU, no torch.

    Without --ctx: the model's own context. Without --weights: as the model is stored.
    Blocks are those that `llmq serve` allocates.
    """
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.budget import Budget
    from llmq.profiles.checkpoint import find_model, has_weights, read_checkpoint, read_config, read_quantization
    from llmq.profiles.kv_spec import KV_DTYPES, KVCacheLayout
    from llmq.profiles.weight_size import WeightSize, weight_size
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import Dtypes, parse_dtype
    from llmq.runtime.memory import most_blocks

    with console.progress() as progress:
        path = find_model(model, config_only=True, keep_blocks=True, progress=progress)
    config = read_config(path)
    architecture = ModelArchitecture.from_config(config)
    engine = EngineConfig(model=str(path), kv_dtype=parse_dtype("--kv-dtype", kv_dtype))
    dtypes = Dtypes.of(architecture.dtype, read_quantization(path, config), engine)
    # With the weights at hand, as serve decides it; for a config alone, as the format has it.
    if kv_scales in ("static", "dynamic") and KV_DTYPES[dtypes.kv_dtype].bits >= 16:
        raise InputError(f"--kv-scales {kv_scales}: a KV-cache in {dtypes.kv_dtype} has no scales; see --kv-dtype")
    as_served = not dtypes.has_static_kv_scales if has_weights(path) else None
    layout = KVCacheLayout.of(
        architecture,
        dtypes.kv_dtype,
        block_tokens=block_size,
        tensor_parallel=tp,
        dynamic_scales=_choice("--kv-scales", kv_scales, {"auto": as_served, "static": False, "dynamic": True}),
    )
    sizes = weight_size(path, weights)
    if weights is None and has_weights(path):
        held_bytes = read_checkpoint(path).held_bytes(dtypes.float_bytes)
        if held_bytes != sizes.num_bytes:
            sizes = WeightSize(held_bytes, f"as stored, held in {dtypes.dtype}")
    rank_weights = -(-sizes.num_bytes // tp)
    budget = Budget(
        architecture=architecture,
        layout=layout,
        ranks=tp,
        num_tokens=parse_tokens(ctx) if ctx else architecture.max_position_embeddings,
        weights=sizes,
        step_tokens=engine.max_num_batched_tokens,
        memory=_memory(gpu, memory, kv_cache_memory, gpu_memory_utilization, rank_weights),
        most_blocks=most_blocks(layout, engine, architecture.max_position_embeddings) if gpu == "auto" else None,
    )
    if as_json:
        console.print_json(_as_json(model, budget))
    else:
        _print(model, budget, ctx)


def _choice(flag: str, value: str, choices: dict[str, Any]) -> Any:
    if value not in choices:
        raise InputError(f"{flag} {value}: one of {', '.join(choices)}")
    return choices[value]


def _memory(
    gpu: str | None, memory: str | None, kv_cache_memory: str | None, share: float | None, weight_bytes: int
) -> "Memory | None":
    """The one memory that was named, or None. `weight_bytes`: of a rank."""
    from llmq.profiles import budget
    from llmq.profiles.devices import find_device
    from llmq.runtime.memory import GPU_SHARE

    flags = {"--gpu": gpu, "--memory": memory, "--kv-cache-memory": kv_cache_memory}
    named = [flag for flag, value in flags.items() if value]
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} exclude each other: give one of them")
    if share is not None and not gpu:
        raise InputError("--gpu-memory-utilization is about a GPU: give --gpu with it")
    if share is not None and not 0 < share <= 1:
        raise InputError(f"--gpu-memory-utilization {share}: a share above 0 and up to 1")
    if kv_cache_memory:
        return budget.kv_cache_memory(parse_bytes(kv_cache_memory))
    if memory:
        return budget.whole_memory("memory", parse_bytes(memory), weight_bytes)
    if gpu and gpu != "auto":
        device = find_device(gpu)
        return budget.gpu_memory(device.name, device.memory_bytes, share or GPU_SHARE, weight_bytes)
    return _this_machine(share, weight_bytes) if gpu else None


def _this_machine(share: float | None, weight_bytes: int) -> "Memory":
    from llmq.profiles import budget, machine
    from llmq.runtime.memory import CPU_SHARE, GPU_SHARE

    if gpus := machine.gpus():
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        return budget.gpu_memory(smallest.name, smallest.memory_bytes, share or GPU_SHARE, weight_bytes)
    if share is not None:
        raise InputError("--gpu-memory-utilization: --gpu auto finds no GPU on this machine")
    name = f"free RAM (no GPU; KV gets {CPU_SHARE:.0%})"
    return budget.shared_memory(name, machine.available_memory_bytes(), CPU_SHARE, weight_bytes)


def _print(model: str, budget: "Budget", ctx: str | None) -> None:
    arch, spec = budget.architecture, budget.layout.groups[0].spec
    console.heading(
        f"{model}: {arch.model_type}, {arch.num_layers} layers, {arch.num_attention_heads} heads, "
        f"{arch.num_kv_heads} KV head{'s' * (arch.num_kv_heads > 1)}, head_dim {arch.head_dim}; "
        f"KV-cache in {spec.dtype.name}"
    )
    columns = ["", ">"] if budget.ranks == 1 else ["", ">one rank", f">all {budget.ranks} ranks"]
    rows = [*_kv_rows(budget), []]
    if budget.memory:
        rows += _memory_rows(budget)
    console.print_table(None, columns, rows)
    console.print_notes(_notes(budget, ctx))


def _row(what: str, num_bytes: int, ranks: int, form: Callable[[int], str]) -> list[str]:
    return [what, form(num_bytes)] if ranks == 1 else [what, form(num_bytes), form(num_bytes * ranks)]


def _kv_rows(budget: "Budget") -> list[list[str]]:
    layout, arch, ranks = budget.layout, budget.architecture, budget.ranks
    form = format_bytes_exact if ranks == 1 else format_bytes  # three columns leave no room for both
    rows = [
        _row("KV of one token, payload", layout.payload_bytes_per_token, ranks, _in_bytes),
        _row("KV of one token, scales", layout.scale_bytes_per_token, ranks, _in_bytes),
        _row(f"KV of {budget.num_tokens:,} tokens", budget.sequence_bytes, ranks, form),
    ]
    if budget.reserved_bytes != budget.sequence_bytes:
        rows.append(_row("  in whole blocks, as serve holds it", budget.reserved_bytes, ranks, form))
    if budget.uniform_bytes != budget.sequence_bytes:
        rows.append(_row("  if no layer had a window", budget.uniform_bytes, ranks, form))
    if arch.num_kv_heads < arch.num_attention_heads:
        without = budget.without_gqa_bytes() // ranks
        rows.append(_row(f"  without GQA ({arch.num_attention_heads} KV heads)", without, ranks, form))
    rows.append(_row(f"weights ({budget.weights.how})", budget.rank_weight_bytes, ranks, form))
    return rows


def _in_bytes(num_bytes: int) -> str:
    return f"{num_bytes:,} B"


def _memory_rows(budget: "Budget") -> list[list[str]]:
    memory, layout, ranks = budget.memory, budget.layout, budget.ranks
    rows = [_row(memory.name, memory.num_bytes, ranks, format_bytes)]
    if memory.holds_weights:
        usable = memory.kv_cache_bytes + budget.rank_weight_bytes
        if usable != memory.num_bytes:
            rows.append(_row("  of it for weights and KV", usable, ranks, format_bytes))
        rows.append(_row("  left for KV", memory.kv_cache_bytes, ranks, format_bytes))
    # A block, a token and a sequence are on every rank at once, each rank with its own heads: counted once.
    blank = [""] * (ranks > 1)
    tokens = " / ".join(f"{group.block_tokens}" for group in layout.groups)
    rows.append([f"blocks of {tokens} tokens ({format_bytes(layout.block_bytes)})", *blank, f"{budget.num_blocks:,}"])
    rows.append(["tokens that fit, in one sequence", *blank, f"{budget.longest_sequence:,}"])
    rows.append([f"sequences of {budget.num_tokens:,} tokens", *blank, f"{budget.num_sequences:,}"])
    return rows


def _notes(budget: "Budget", ctx: str | None) -> list[str]:
    layout, arch, dtype, notes = budget.layout, budget.architecture, budget.layout.groups[0].spec.dtype, []
    if ctx and ctx.strip().lower().endswith(("k", "m")):
        decimal = int(float(ctx.strip()[:-1]) * (1000 if ctx.strip().lower().endswith("k") else 1_000_000))
        size = format_bytes(layout.needed_bytes(decimal) * budget.ranks)
        notes.append(f"{ctx} is read as {budget.num_tokens:,} tokens (k = 1024); {decimal:,} tokens take {size}.")
    if arch.family is None:
        notes.append(f"model_type {arch.model_type} is not one that llmq knows: the cache is derived from config.json.")
    if budget.num_tokens > arch.max_position_embeddings:
        notes.append(f"The model's own context is {arch.max_position_embeddings:,} tokens.")
    if dtype.bits < 16 and not dtype.scale_bytes:
        notes.append(
            "Scales are static: one for K and one for V of each layer, as a checkpoint calibrated for it stores them. "
            "Without those serve stores dynamic ones: --kv-scales dynamic."
        )
    if budget.ranks > arch.num_kv_heads:
        notes.append(f"Each KV head is held by {budget.ranks // arch.num_kv_heads} ranks.")
    if budget.ranks > 1:
        notes.append(f"Valid --tp: {', '.join(map(str, arch.valid_tensor_parallel))}.")
    if budget.memory is None:
        notes.append("Give --gpu h100 or --memory 80GiB to see how many fit.")
    elif budget.memory.kv_cache_bytes < 0:
        lacking = format_bytes(-budget.memory.kv_cache_bytes)
        notes.append(
            f"The weights alone are {lacking} too large for it: more ranks (--tp) or fewer bits (--weights w4)."
        )
    elif budget.num_blocks == budget.most_blocks:
        notes.append(
            f"serve takes no more blocks: they hold all requests that it runs at once (--max-num-seqs) at the model's "
            f"{arch.max_position_embeddings:,} tokens."
        )
    elif not budget.num_sequences:
        notes.append("Not one sequence fits: a shorter --ctx, more ranks (--tp), or fewer bits (--kv-dtype fp8).")
    return notes


def _as_json(model: str, budget: "Budget") -> dict[str, Any]:
    layout, arch, memory = budget.layout, budget.architecture, budget.memory
    spec = layout.groups[0].spec
    result = {
        "model": model,
        "model_type": arch.model_type,
        "num_layers": arch.num_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_kv_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "kv_dtype": spec.dtype.name,
        "num_tokens": budget.num_tokens,
        "tensor_parallel": budget.ranks,
        "valid_tensor_parallel": arch.valid_tensor_parallel,
        "per_rank": {
            "payload_bytes_per_token": layout.payload_bytes_per_token,
            "scale_bytes_per_token": layout.scale_bytes_per_token,
            "sequence_bytes": budget.sequence_bytes,
            "reserved_bytes": budget.reserved_bytes,
            "uniform_bytes": budget.uniform_bytes,
            "weight_bytes": budget.rank_weight_bytes,
            "block_bytes": layout.block_bytes,
        },
        "total": {
            "bytes_per_token": layout.bytes_per_token * budget.ranks,
            "sequence_bytes": budget.sequence_bytes * budget.ranks,
            "sequence_bytes_without_gqa": budget.without_gqa_bytes(),
            "weight_bytes": budget.weights.num_bytes,
        },
        "weights": budget.weights.how,
        "block_tokens": [group.block_tokens for group in layout.groups],
        "memory": None,
    }
    if memory:
        result["memory"] = {
            "name": memory.name,
            "bytes": memory.num_bytes,
            "kv_cache_bytes": memory.kv_cache_bytes,
            "num_blocks": budget.num_blocks,
            "longest_sequence": budget.longest_sequence,
            "num_sequences": budget.num_sequences,
        }
    return result
