"""`llmq kv-budget`: how many tokens and sequences fit, from config.json alone."""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.profiles.errors import InputError
from llmq.profiles.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.budget import Budget, Memory
    from llmq.profiles.kv_spec import KVCacheLayout
    from llmq.profiles.users import Users
    from llmq.profiles.weight_size import WeightSize
    from llmq.runtime.dtypes import Dtypes

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
    lengths: Annotated[
        str | None, typer.Option(help="A trace (.csv, .jsonl): how many users with its lengths fit.")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="A devices.toml of your own; its rows come first.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic, too.")] = False,
    plot: Annotated[str | None, typer.Option(help="Draw memory against context into this .html file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How many tokens and sequences fit in a memory, from config.json alone: no weights, no GPU, no torch.

    Without --ctx: the model's own context. Without --weights: as the model is stored.
    Blocks are those that `llmq serve` allocates.
    """
    from llmq.cli.kv_budget_explain import budget_json, explain_budget
    from llmq.cli.kv_budget_text import print_budget
    from llmq.profiles.architecture import ModelArchitecture, names_dtype
    from llmq.profiles.budget import Budget
    from llmq.profiles.checkpoint import find_model, read_config, read_quantization
    from llmq.profiles.step_memory import step_memory
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import Dtypes, parse_dtype
    from llmq.runtime.memory import most_blocks

    plot_path = _plot_path(plot)
    if explain and as_json:
        raise InputError("--explain is for reading, --json for programs: give one of them")
    if lengths and not (gpu or memory or kv_cache_memory):
        raise InputError("--lengths asks how many fit: give a memory with it, as --gpu h100 or --memory 80GiB")
    with console.progress() as progress:
        path = find_model(model, config_only=True, keep_blocks=True, progress=progress)
    config = read_config(path)
    architecture = _known(ModelArchitecture.from_config(config))
    engine = EngineConfig(model=str(path), kv_dtype=parse_dtype("--kv-dtype", kv_dtype))
    dtypes = Dtypes.of(architecture.dtype, read_quantization(path, config), engine)
    layout = _layout(path, architecture, dtypes, block_tokens=block_size, ranks=tp, kv_scales=kv_scales)
    sizes = _weights(path, weights, dtypes, are_needed=bool(gpu or memory or weights))
    rank_weights = -(-sizes.num_bytes // tp) if sizes else 0
    budget = Budget(
        architecture=architecture,
        layout=layout,
        ranks=tp,
        num_tokens=parse_tokens(ctx) if ctx else architecture.max_position_embeddings,
        weights=sizes,
        step_tokens=engine.max_num_batched_tokens,
        memory=_memory(gpu, memory, kv_cache_memory, gpu_memory_utilization, rank_weights, devices),
        most_blocks=most_blocks(layout, engine, architecture.max_position_embeddings) if gpu == "auto" else None,
        step=step_memory(
            architecture,
            config,
            step_tokens=engine.max_num_batched_tokens,
            num_sequences=engine.max_num_seqs,
            float_bytes=dtypes.float_bytes,
            ranks=tp,
        ),
    )
    users = _users(budget, lengths)
    if as_json:
        console.print_json(budget_json(model, budget, users))
    else:
        print_budget(model, budget, users, ctx)
        if kv_dtype == "auto" and not names_dtype(config):
            console.print_notes([f"config.json names no dtype: {dtypes.kv_dtype} is assumed; see --kv-dtype."])
        if explain:
            explain_budget(budget)
    if plot_path:
        from llmq.profiles.budget_plot import budget_page

        _write(plot_path, budget_page(model, budget))


def _known(architecture: "ModelArchitecture") -> "ModelArchitecture":
    """Raises InputError for a model_type that no table has: what it keeps of a token would be a guess."""
    from llmq.profiles.cache_table import CACHE_ROWS

    if architecture.is_known:
        return architecture
    near = difflib.get_close_matches(architecture.model_type, CACHE_ROWS, n=3, cutoff=0.5)
    raise InputError(
        f"config.json: model_type {architecture.model_type!r} is not one of the {len(CACHE_ROWS)} whose KV-cache is "
        f"known{' (near it: ' + ', '.join(near) + ')' if near else ''}: what it keeps of a token would be a guess"
    )


def _users(budget: "Budget", lengths: str | None) -> "Users | None":
    if lengths is None:
        return None
    from llmq.profiles.users import users_of

    return users_of(budget, Path(lengths))


def _plot_path(plot: str | None) -> Path | None:
    """Raises InputError for what is not drawn, before anything is computed."""
    if plot is None:
        return None
    path = Path(plot)
    if path.suffix != ".html":
        raise InputError(
            f"--plot {plot}: a page with the plot as SVG is written, as out.html; a picture in pixels "
            f"({path.suffix or 'no suffix'}) would need a drawing library, which llmq does not bring"
        )
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot {plot}: there is no folder {path.absolute().parent}")
    return path


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--plot {path}: {error.strerror}") from None
    console.status(f"wrote {path}")


def _layout(
    path: Path, architecture: "ModelArchitecture", dtypes: "Dtypes", *, block_tokens: int, ranks: int, kv_scales: str
) -> "KVCacheLayout":
    from llmq.profiles.checkpoint import has_weights
    from llmq.profiles.kv_spec import KV_DTYPES, KVCacheLayout

    if kv_scales in ("static", "dynamic") and KV_DTYPES[dtypes.kv_dtype].bits >= 16:
        raise InputError(f"--kv-scales {kv_scales}: a KV-cache in {dtypes.kv_dtype} has no scales; see --kv-dtype")
    # As serve decides it; for a config alone that says nothing of scales, as the format has it.
    is_said = has_weights(path) or dtypes.has_static_kv_scales
    as_served = not dtypes.has_static_kv_scales if is_said else None
    return KVCacheLayout.of(
        architecture,
        dtypes.kv_dtype,
        block_tokens=block_tokens,
        tensor_parallel=ranks,
        dynamic_scales=_choice("--kv-scales", kv_scales, {"auto": as_served, "static": False, "dynamic": True}),
    )


def _weights(path: Path, wanted: str | None, dtypes: "Dtypes", *, are_needed: bool) -> "WeightSize | None":
    """None: not known from config.json alone, and what a token takes is known without them."""
    from llmq.profiles.checkpoint import has_weights, read_checkpoint
    from llmq.profiles.linear_shape import UnknownWeightsError
    from llmq.profiles.weight_size import weight_size

    try:
        sizes = weight_size(path, wanted)
    except UnknownWeightsError:
        if are_needed:
            raise
        return None
    if wanted is None and has_weights(path):
        held_bytes = read_checkpoint(path).held_bytes(dtypes.float_bytes)
        if held_bytes != sizes.num_bytes:
            return replace(sizes, num_bytes=held_bytes, how=f"as stored, held in {dtypes.dtype}", parts=())
    return sizes


def _choice(flag: str, value: str, choices: dict[str, Any]) -> Any:
    if value not in choices:
        raise InputError(f"{flag} {value}: one of {', '.join(choices)}")
    return choices[value]


def _memory(
    gpu: str | None,
    memory: str | None,
    kv_cache_memory: str | None,
    share: float | None,
    weight_bytes: int,
    devices: str | None,
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
    if devices and gpu in (None, "auto"):
        raise InputError("--devices names GPUs: give the name of one with it, as --gpu h100")
    if kv_cache_memory:
        return budget.kv_cache_memory(parse_bytes(kv_cache_memory))
    if memory:
        return budget.whole_memory("memory", parse_bytes(memory), weight_bytes)
    if gpu and gpu != "auto":
        device = find_device(gpu, Path(devices) if devices else None)
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
