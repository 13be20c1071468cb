"""The options of an engine as verbs take them, declared once: words -> EngineConfig."""

from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from llmq.profiles.errors import InputError
from llmq.profiles.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from llmq.profiles.architecture import ModelArchitecture
    from llmq.runtime.config import EngineConfig, Speculation

# A verb's parameter is declared as `dtype: Dtype = "auto"`; what it is without being given is the verb's.
Model = Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or an alias as smollm2-135m.")]
Dtype = Annotated[str, typer.Option(help="Of the activations: auto (the checkpoint's), bf16, fp16, fp32.")]
KvDtype = Annotated[str, typer.Option(help="Of the KV-cache: auto, bf16, fp16, fp32, int8, fp8, int4.")]
KvCacheMemory = Annotated[str | None, typer.Option(help="Memory for KV blocks: 64MiB, 20GiB.")]
MaxModelLen = Annotated[
    str, typer.Option(help="Most tokens of a request, prompt and output; auto: what fits, up to the model's own.")
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Requests in one batch.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(min=1, help="Tokens computed in one step.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Kernels = Annotated[str, typer.Option(help="auto, torch; of a CPU native, of a GPU triton.")]
Head = Annotated[
    str,
    typer.Option(
        help="Of native kernels, a head stored in 16 bit: auto (int8 where the layers are quantized), 16bit, int8."
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        help="Of native kernels, what integer weights and an integer KV-cache multiply: auto (exact), exact, int8."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of the engine.")]
TensorParallel = Annotated[
    int,
    typer.Option("--tp", min=1, help="Ranks that share the model, a process each: a GPU or a part of the CPU."),
]
PipelineParallel = Annotated[
    int,
    typer.Option("--pp", min=1, help="Stages that hold some of the layers each, in as many ranks as --tp says."),
]
Speculative = Annotated[
    str | None,
    typer.Option(
        help="Guess tokens, verify several in one step: ngram (as the text went on before), draft (by --draft-model, "
        "--draft-quant or --draft-layers), eagle, medusa (heads in the folder --draft-model), or auto: as many as "
        "are worth their time, by a drafter or else by n-grams. No token changes.",
        show_default=False,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        min=1, max=64, help="Guessed for a request at once, at most.  [default: 4; 8 with auto]", show_default=False
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="A smaller model of the same vocabulary, which guesses for this one.", show_default=False),
]
DraftQuant = Annotated[
    str | None,
    typer.Option(
        help="A copy of the model in 3 or 4 bits guesses for it: w3 or w4. Made once, without calibration, and cached.",
        show_default=False,
    ),
]
DraftLayers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="So many first layers of the model, with its head, guess for all: no more memory.",
        show_default=False,
    ),
]
SpeculativePool = Annotated[
    str | None,
    typer.Option(
        help="With n-grams: guess by so many tokens (64k) of finished requests' answers too, of the same cache salt.",
        show_default=False,
    ),
]
ServedModelName = Annotated[
    str | None, typer.Option(help="What requests call the model. Default: the folder's name, or the id as given.")
]


def engine_config(
    *,
    dtype: str,
    kv_dtype: str,
    device: str,
    kernels: str,
    head: str,
    activations: str,
    max_model_len: str,
    kv_cache_memory: str | None,
    **others: Any,
) -> "EngineConfig":
    """For a model that is not there yet (`model` is empty): a mistyped word is refused before anything is downloaded.

    `others` are EngineConfig's own. Raises InputError.
    """
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import parse_dtype
    from llmq.runtime.parallel.stage_plan import check_pipeline

    check_device(device)
    check_word("--kernels", kernels)
    check_word("--head", head)
    check_word("--activations", activations)
    config = EngineConfig(
        model="",
        dtype=parse_dtype("--dtype", dtype),
        kv_dtype=parse_dtype("--kv-dtype", kv_dtype),
        device=device,
        kernels=kernels,
        head=head,
        activations=activations,
        max_model_len=None if max_model_len == "auto" else _tokens_of("--max-model-len", max_model_len),
        kv_cache_memory_bytes=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
        **others,
    )
    check_pipeline(config)
    return config


def check_ranks(path: "Path", tp: int, pp: int = 1) -> None:
    """Raises InputError, before torch is imported, where a model cannot be split so."""
    from llmq.profiles.checkpoint import read_checkpoint
    from llmq.runtime.parallel import shard_plan, stage_plan

    if tp * pp > 1:
        checkpoint = read_checkpoint(path)
        architecture, config = checkpoint.architecture, checkpoint.config
        schemes = shard_plan.declared_schemes(architecture, config, checkpoint.quantization)
        shard_plan.check_ranks(architecture, config, tp, schemes)
        stage_plan.check_stages(architecture, pp)


def valid_ranks(
    architecture: "ModelArchitecture",
    config: dict[str, Any],
    quantization: dict[str, Any] | None,
    weights: str | None = None,
    asked: int = 1,
) -> list[int]:
    """Numbers of ranks that `--tp` takes of a model by its config.json, or of it in `weights` (w4g64). Where that does
    not say how it would be split, what its heads allow. Raises InputError, with them, where `asked` is none of them."""
    from llmq.profiles.weight_size import parse_storage
    from llmq.runtime.parallel import shard_plan

    if not shard_plan.names_widths(architecture, config):
        valid = architecture.valid_tensor_parallel
        if asked not in valid:
            raise InputError(
                f"--tp {asked} does not split {architecture.num_attention_heads} heads and "
                f"{architecture.num_kv_heads} KV heads evenly; valid: {', '.join(map(str, valid))}"
            )
        return valid
    schemes = shard_plan.declared_schemes(architecture, config, quantization)
    if weights is not None:
        try:
            schemes = shard_plan.stored_schemes(architecture, config, parse_storage(weights, config))
        except ValueError:  # a size, as 40GiB
            schemes = {}
    shard_plan.check_ranks(architecture, config, asked, schemes)
    return shard_plan.valid_ranks(architecture, config, schemes)


def check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: one of auto, cpu, cuda")


def check_word(flag: str, word: str) -> None:
    """Raises InputError for a word that the field of EngineConfig of that name does not take."""
    from llmq.runtime.config import EngineConfig

    words = get_args(get_type_hints(EngineConfig)[flag.removeprefix("--")])
    if word not in words:
        raise InputError(f"{flag} {word}: one of {', '.join(words)}")


def speculation(
    method: str | None,
    num_tokens: int | None,
    draft_model: str | None,
    draft_quant: str | None,
    draft_layers: int | None,
    pool: str | None = None,
) -> "Speculation | None":
    """Without the drafter's folder, which is not found yet. Raises InputError."""
    from llmq.runtime.config import Speculation

    drafters = {"--draft-model": draft_model, "--draft-quant": draft_quant, "--draft-layers": draft_layers}
    given = {"--num-speculative-tokens": num_tokens, "--speculative-pool": pool, **drafters}
    said = [f"{name} {value}" for name, value in given.items() if value is not None]
    if method is None:
        if said:
            raise InputError(f"{said[0]}: nothing is guessed without --speculative")
        return None
    if method not in ("ngram", "draft", "eagle", "medusa", "auto"):
        raise InputError(f"--speculative {method}: one of ngram, draft, eagle, medusa, auto")
    chosen = [name for name, value in drafters.items() if value is not None]
    if len(chosen) > 1:
        raise InputError(f"{chosen[0]} and {chosen[1]} exclude each other: give one of them")
    if draft_quant not in (None, "w3", "w4"):
        raise InputError(f"--draft-quant {draft_quant}: one of w3, w4")
    if method == "ngram" and chosen:
        raise InputError(f"{said[-1]}: --speculative ngram takes no drafter; use draft or auto")
    if method == "draft" and not chosen:
        raise InputError("--speculative draft: by which model? Give --draft-model, --draft-quant w4 or --draft-layers")
    if method in ("eagle", "medusa") and draft_model is None:
        raise InputError(f"--speculative {method}: by which heads? Give their folder as --draft-model")
    if pool is not None and (chosen or method not in ("ngram", "auto")):
        raise InputError(f"--speculative-pool {pool}: n-grams are found in it; use ngram, or auto without a drafter")
    adaptive = method == "auto"
    return Speculation(
        method=method if method != "auto" else "draft" if chosen else "ngram",
        num_tokens=num_tokens or (8 if adaptive else 4),
        adaptive=adaptive,
        draft_layers=draft_layers,
        pool_tokens=0 if pool is None else _tokens_of("--speculative-pool", pool),
    )


def _tokens_of(name: str, text: str) -> int:
    try:
        return parse_tokens(text)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
