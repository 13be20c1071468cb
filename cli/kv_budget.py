"""`llmq kv-budget`: how many tokens and sequences fit, from config.json alone."""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.profiles.errors import InputError
from llmq.profiles.units import parse_tokens

if TYPE_CHECKING:
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.budget import Budget, Memory
    from llmq.profiles.kv_spec import KVCacheLayout
    from llmq.profiles.users import Users
    from llmq.profiles.weight_size import WeightSize
    from llmq.runtime.config import EngineConfig
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
    pp: Annotated[int, typer.Option(min=1, help="Stages of a pipeline, each of as many ranks as --tp says.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32, fp8, int8 or int4.")] = "auto",
    kv_scales: Annotated[str, typer.Option(help="Scales of a quantized KV-cache: auto, static, dynamic.")] = "auto",
    weights: Annotated[str | None, typer.Option(help="bf16, fp8, int8, w4, w4g64, or bytes: 40GiB.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    draft_model: Annotated[str | None, typer.Option(help="A model that guesses for it, as in serve.")] = None,
    draft_quant: Annotated[str | None, typer.Option(help="Its copy that guesses for it: w3 or w4.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="A trace (.csv, .jsonl): how many users with its lengths fit.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Sequences that the engine runs at once. Default: its own.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a step computes at most. Default: the engine's own.")
    ] = None,
    engine: Annotated[str, typer.Option(help="Whose pool: llmq, or vllm@0.11.0 with an interval.")] = "llmq",
    calibrate: Annotated[
        str | None, typer.Option(help="A start-up log of that vLLM on that GPU, which its overheads are fitted to.")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="A devices.toml of your own; its rows come first.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic, too.")] = False,
    plot: Annotated[str | None, typer.Option(help="Draw memory against context into this .html file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How many tokens and sequences fit in a memory, from config.json alone: no weights, no GPU, no torch.

    Without --ctx: the model's own context. Without --weights: as the model is stored.
    Blocks are those that `llmq serve` allocates, or with --engine those that another engine will: exit code 0 where a
    request of --ctx tokens fits in the least of its pool, 1 where it does not in the most, 3 between.
    """
    from llmq.cli.engine_options import valid_ranks
    from llmq.cli.kv_budget_drafter import planned_drafter
    from llmq.cli.kv_budget_engine import EngineQuestion, parse_engine, print_engine_budget, print_engine_json
    from llmq.cli.kv_budget_explain import budget_json, explain_budget
    from llmq.cli.kv_budget_memory import MemoryFlags
    from llmq.cli.kv_budget_text import print_budget
    from llmq.profiles.architecture import ModelArchitecture, names_dtype
    from llmq.profiles.budget import Budget
    from llmq.profiles.checkpoint import find_model, read_config, read_quantization
    from llmq.profiles.step_memory import step_memory
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import Dtypes, parse_dtype
    from llmq.runtime.memory import most_blocks, with_drafter_layers

    plot_path = _plot_path(plot)
    if explain and as_json:
        raise InputError("--explain is for reading, --json for programs: give one of them")
    if lengths and not (gpu or memory or kv_cache_memory):
        raise InputError("--lengths asks how many fit: give a memory with it, as --gpu h100 or --memory 80GiB")
    if plot and pp > 1:
        raise InputError("--plot draws the memory of ranks that hold the same: leave it or --pp away")
    if pp > 1 and (draft_model or draft_quant):
        raise InputError("a drafter does not run beside the stages of a pipeline: leave it or --pp away")
    version = parse_engine(engine)
    flags = MemoryFlags(gpu, memory, kv_cache_memory, gpu_memory_utilization, devices)
    if version is None and calibrate:
        raise InputError("--calibrate fits what another engine reserves: name it, as --engine vllm@0.11.0")
    if version is not None:
        own = {
            "--kv-cache-memory": kv_cache_memory,
            "--kv-scales": kv_scales != "auto",
            "--lengths": lengths,
            "--explain": explain,
            "--plot": plot,
            "--draft-model": draft_model,
            "--draft-quant": draft_quant,
            "--pp": pp > 1,
        }
        if given := [flag for flag, value in own.items() if value]:
            raise InputError(f"{given[0]} is about llmq's own cache: leave it or --engine {engine} away")
    with console.progress() as progress:
        path = find_model(model, config_only=True, keep_blocks=True, progress=progress)
    config = read_config(path)
    architecture = _known(ModelArchitecture.from_config(config))
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    settings = EngineConfig(
        model=str(path),
        kv_dtype=parse_dtype("--kv-dtype", kv_dtype),
        **{name: value for name, value in limits.items() if value is not None},
    )
    dtypes = Dtypes.of(architecture.dtype, read_quantization(path, config), settings)
    num_tokens = parse_tokens(ctx) if ctx else architecture.max_position_embeddings
    if version is not None:
        name, num_bytes = flags.whole_memory()
        layout = _layout(path, architecture, dtypes, block_tokens=block_size, ranks=tp, kv_scales="auto")
        question = EngineQuestion(
            version=version,
            memory_name=name,
            memory_bytes=num_bytes,
            utilization=gpu_memory_utilization,
            max_model_len=num_tokens,
            ranks=tp,
            kv_dtype=layout.groups[0].spec.dtype.name,
            block_tokens=block_size,
            num_tokens=max_num_batched_tokens,
            num_seqs=max_num_seqs,
            calibrate=calibrate,
        )
        found = question.answer(architecture, config, _weights(path, weights, dtypes, are_needed=True))
        (print_engine_json if as_json else print_engine_budget)(model, question, found)
        raise typer.Exit(found.fit.exit_code)
    ranks = valid_ranks(architecture, config, read_quantization(path, config), weights, asked=tp)
    drafter = planned_drafter(path, draft_model, draft_quant)
    cached = with_drafter_layers(architecture, drafter and drafter.architecture)
    layout = _layout(path, cached, dtypes, block_tokens=block_size, ranks=tp, kv_scales=kv_scales)
    sizes = _weights(path, weights, dtypes, are_needed=bool(gpu or memory or weights))
    if gpu == "auto" and weights is None and architecture.family is not None:
        sizes = _held_here(path, settings, dtypes, sizes)
    if drafter is not None and sizes is not None:
        more = _weights(drafter.path, drafter.scheme, dtypes, are_needed=True)
        if gpu == "auto" and drafter.scheme is None and drafter.architecture.family is not None:
            more = _held_here(drafter.path, settings, dtypes, more)
        sizes = sizes.beside("drafter", more)
    budget = Budget(
        architecture=cached,
        drafter_layers=drafter.num_layers if drafter else 0,
        layout=layout,
        ranks=tp,
        valid_ranks=tuple(ranks),
        num_tokens=num_tokens,
        weights=sizes,
        step_tokens=settings.max_num_batched_tokens,
        memory=flags.memory(sizes.num_bytes if sizes else 0, tp),
        most_blocks=most_blocks(layout, settings, architecture.max_position_embeddings) if gpu == "auto" else None,
        step=step_memory(
            architecture,
            config,
            step_tokens=settings.max_num_batched_tokens,
            num_sequences=settings.max_num_seqs,
            float_bytes=dtypes.float_bytes,
            ranks=tp,
        ),
    )
    if pp > 1:
        from llmq.cli.kv_budget_stages import with_stages

        def memory_beside(weight_bytes: int) -> "Memory | None":
            return flags.memory(sizes.num_bytes if sizes else 0, tp * pp, weight_bytes)

        budget = with_stages(budget, pp, path, dtypes, memory_beside, as_stored=weights is None)
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


def _held_here(path: Path, settings: "EngineConfig", dtypes: "Dtypes", sizes: "WeightSize") -> "WeightSize":
    """As an engine on this machine holds them: its CPU may have kernels with a layout of their own."""
    from llmq.profiles import machine
    from llmq.profiles.checkpoint import has_weights, read_checkpoint
    from llmq.runtime.dtypes import native_numerics
    from llmq.runtime.memory import weight_bytes

    if not has_weights(path) or machine.gpus():
        return sizes
    checkpoint = read_checkpoint(path)
    numerics = native_numerics(checkpoint, settings, dtypes, "cpu")
    num_bytes = weight_bytes(checkpoint, dtypes, numerics)
    if num_bytes == sizes.num_bytes:
        return sizes
    head = "int8" if numerics.int8_head else dtypes.dtype
    return replace(sizes, num_bytes=num_bytes, how=f"{sizes.how}, a head in {head} for native kernels", parts=())


def _choice(flag: str, value: str, choices: dict[str, Any]) -> Any:
    if value not in choices:
        raise InputError(f"{flag} {value}: one of {', '.join(choices)}")
    return choices[value]
