"""`llmq inspect`: what is in a checkpoint, from its config and its headers alone."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.profiles.errors import InputError
from llmq.profiles.units import format_bytes, format_bytes_exact

if TYPE_CHECKING:
    from llmq.profiles.checkpoint import Checkpoint
    from llmq.profiles.modules import Module
    from llmq.profiles.tokenizer_facts import TokenizerFacts
    from llmq.quantize.formats.quantized_weight import WeightScheme

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Kind:
    """Modules that are alike but for their layer."""

    name: str
    form: str  # as declared where there is a declaration, else as stored
    activation: str | None  # how a quantized linear rounds its input; None: not at all
    shape: tuple[int, ...]
    modules: "list[Module]"

    @property
    def num_bytes(self) -> int:
        return sum(module.num_bytes for module in self.modules)

    @property
    def num_weights(self) -> int:
        return sum(module.num_weights for module in self.modules)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or smollm2-135m.")],
    layers: Annotated[bool, typer.Option("--layers", help="A row for each module instead of each kind.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What is in a checkpoint: architecture, how each linear is stored, bytes, tokenizer.

    Read from config and safetensors headers: no weight is loaded, and of a hub id none is downloaded.
    """
    from llmq.profiles.checkpoint import find_model, read_checkpoint
    from llmq.profiles.gguf_convert import read_gguf
    from llmq.profiles.model_name import parse_model_name
    from llmq.profiles.modules import modules_of
    from llmq.profiles.tokenizer_facts import tokenizer_facts

    with console.progress() as progress:
        path = find_model(model, config_only=True, keep_blocks=True, progress=progress)
    named = parse_model_name(model)
    checkpoint = read_gguf(named.path) if named.kind == "gguf" else read_checkpoint(path)
    modules = modules_of(checkpoint.tensors.values(), checkpoint.quantization)
    schemes, problems = _declared_schemes(checkpoint, modules)
    kinds = _kinds(modules, schemes, each=layers)
    facts = tokenizer_facts(path, checkpoint.config)
    if as_json:
        console.print_json(_as_json(model, checkpoint, kinds, schemes, facts, problems))
    else:
        _print(model, checkpoint, kinds, schemes, facts, problems)


def _declared_schemes(checkpoint: "Checkpoint", modules: "list[Module]") -> tuple[dict[str, "WeightScheme"], list[str]]:
    """What quantization_config says of each linear, and where the file holds something else."""
    if not checkpoint.quantization:
        return {}, []
    from llmq.quantize.formats.registry import format_of
    from llmq.quantize.formats.scheme import FormatError

    try:
        declared = format_of(checkpoint.quantization, checkpoint.tensors.keys())
    except FormatError as error:
        return {}, [f"llmq does not run this format: {error}"]
    schemes, problems = {}, []
    for module in modules:
        scheme = declared.scheme_for(module.name) if module.is_linear else None
        if scheme is None and module.is_quantized:
            problems.append(f"{module.name} is left out by the config, and stored as {module.layout}")
        elif scheme is not None:
            schemes[module.name] = scheme
            absent = [name for name in declared.tensor_names(module.name, scheme) if name not in checkpoint.tensors]
            if absent:
                problems.append(f"{module.name} is {scheme.name} by the config, and {absent[0]} is not stored")
    return schemes, problems


def _kinds(modules: "list[Module]", schemes: dict[str, "WeightScheme"], each: bool) -> list[Kind]:
    kinds: dict[tuple, Kind] = {}
    for module in modules:
        name = module.name if each else module.kind
        form = module.layout or ", ".join(sorted(module.tensors))
        activation = None
        if scheme := schemes.get(module.name):
            form = replace(scheme, activation=None).name.replace("symmetric", "sym")
            activation = scheme.activation.name if scheme.activation else None
        kind = Kind(name, form, activation, module.shape, [])
        kinds.setdefault((name, form, activation, module.shape), kind).modules.append(module)
    return list(kinds.values())


def _print(
    model: str,
    checkpoint: "Checkpoint",
    kinds: list[Kind],
    schemes: "dict[str, WeightScheme]",
    facts: "TokenizerFacts",
    problems: list[str],
) -> None:
    console.heading(f"{model}: {_describe(checkpoint)}")
    rows: list[list[Any]] = [
        [
            len(kind.modules),
            kind.name + _layer_range(kind, checkpoint),
            kind.form,
            "×".join(map(str, kind.shape)),
            format_bytes(kind.num_bytes),
            _bits(kind.num_bytes, kind.num_weights),
        ]
        for kind in kinds
    ]
    total_weights = sum(kind.num_weights for kind in kinds)
    total = ["", "all", "", f"{total_weights:,}", format_bytes(checkpoint.total_bytes)]
    console.print_table(
        None,
        [">", "module", "stored as", ">shape", ">bytes", ">bits"],
        [*rows, [], [*total, _bits(checkpoint.total_bytes, total_weights)]],
    )
    console.print_notes([*_summary(checkpoint, kinds, schemes), *_tokenizer_lines(facts), *problems])


def _describe(checkpoint: "Checkpoint") -> str:
    config = {**checkpoint.config, **checkpoint.config.get("text_config", {})}
    names = {"num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "KV heads"}
    counts = [f"{config[key]} {name}" for key, name in names.items() if key in config]
    context = config.get("max_position_embeddings")
    extra = [f"hidden {config['hidden_size']}"] if "hidden_size" in config else []
    return ", ".join([str(config.get("model_type")), *counts, *extra, *([f"context {context:,}"] if context else [])])


def _layer_range(kind: Kind, checkpoint: "Checkpoint") -> str:
    """` (layers 0-3, 5)` where a kind does not cover all layers."""
    layers = sorted(module.layer for module in kind.modules if module.layer is not None)
    if not layers or kind.name == kind.modules[0].name or len(layers) == checkpoint.config.get("num_hidden_layers"):
        return ""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return f" (layers {', '.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)})"


def _bits(num_bytes: int, num_weights: int) -> str:
    return f"{8 * num_bytes / num_weights:.2f}" if num_weights else ""


def _valid_ranks(checkpoint: "Checkpoint", schemes: "dict[str, WeightScheme]") -> list[int]:
    """Numbers of ranks that `serve --tp` takes; none where the runtime does not split the decoder."""
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.errors import InputError
    from llmq.runtime.parallel.shard_plan import valid_ranks

    config = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    try:
        architecture = ModelArchitecture.from_config(config)
        return valid_ranks(architecture, config, schemes) if architecture.family else []
    except InputError:
        return []


def _summary(checkpoint: "Checkpoint", kinds: list[Kind], schemes: "dict[str, WeightScheme]") -> list[str]:
    linears = [module for kind in kinds for module in kind.modules if module.is_linear and module.layer is not None]
    files = {tensor.file for tensor in checkpoint.tensors.values()}
    tied = checkpoint.config.get("tie_word_embeddings")
    lines = [f"{format_bytes_exact(checkpoint.total_bytes)} in {len(files)} file{'s' * (len(files) > 1)}."]
    if linears:
        bits = _bits(sum(m.num_bytes for m in linears), sum(m.num_weights for m in linears))
        lines.append(f"The linears of the decoder layers take {bits} bits a weight, scales included.")
    if activations := sorted({kind.activation for kind in kinds if kind.activation}):
        lines.append(f"Quantized linears round their input to {', '.join(activations)}.")
    if tied is not None:
        lines.append("The head is tied to the embedding." if tied else "The head has weights of its own.")
    if checkpoint.quantization and _has_float_head(checkpoint):
        lines.append("Native kernels on a CPU round its 16-bit head to int8 when it is loaded, unless --head 16bit.")
    if ranks := _valid_ranks(checkpoint, schemes):
        lines.append(f"Splits over {', '.join(map(str, ranks))} ranks (--tp).")
    if checkpoint.quantization:
        scheme = checkpoint.quantization.get("kv_cache_scheme")
        kv = f"{scheme.get('type')}{scheme.get('num_bits')} KV-cache scales" if scheme else "no KV-cache scales"
        lines.append(f"Quantized by {checkpoint.quantization.get('quant_method')}; {kv}.")
    return lines


def _has_float_head(checkpoint: "Checkpoint") -> bool:
    """Of a decoder that is run by llmq's own code."""
    try:
        architecture = checkpoint.architecture
        return architecture.family is not None and architecture.dtype == "bfloat16" and checkpoint.has_float_head
    except InputError:  # one that is not run at all
        return False


def _tokenizer_lines(facts: "TokenizerFacts") -> list[str]:
    tokens = [
        f"{short} {token or 'not set'}" + (f" ({token_id})" if token_id is not None else "")
        for short, (token, token_id) in facts.special_tokens.items()
        if token is not None or token_id is not None
    ]
    size = f"{facts.vocab_size:,} tokens" if facts.vocab_size else "no tokenizer.json here"
    bos = {True: "a text is given a BOS", False: "no BOS is added", None: "BOS not said"}[facts.adds_bos]
    template = "a chat template" if facts.has_chat_template else "no chat template"
    stops = f"; generation ends at {', '.join(map(str, facts.stop_ids))}" if facts.stop_ids else ""
    return [f"Tokenizer: {', '.join([size, *tokens])}; {bos}; {template}{stops}."]


def _as_json(
    model: str,
    checkpoint: "Checkpoint",
    kinds: list[Kind],
    schemes: "dict[str, WeightScheme]",
    facts: "TokenizerFacts",
    problems: list[str],
) -> dict[str, Any]:
    config = {**checkpoint.config, **checkpoint.config.get("text_config", {})}
    keys = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    total_weights = sum(kind.num_weights for kind in kinds)
    return {
        "model": model,
        "path": str(checkpoint.path),
        **{key: config.get(key) for key in (*keys, "max_position_embeddings", "vocab_size", "tie_word_embeddings")},
        "num_weights": total_weights,
        "total_bytes": checkpoint.total_bytes,
        "bits_per_weight": round(8 * checkpoint.total_bytes / total_weights, 4) if total_weights else None,
        "quantization": checkpoint.quantization,
        "valid_tensor_parallel": _valid_ranks(checkpoint, schemes),
        "modules": [
            {
                "name": kind.name,
                "count": len(kind.modules),
                "layers": [module.layer for module in kind.modules if module.layer is not None],
                "stored_as": kind.form,
                "activation": kind.activation,
                "shape": list(kind.shape),
                "bytes": kind.num_bytes,
                "num_weights": kind.num_weights,
            }
            for kind in kinds
        ],
        "tokenizer": {
            "vocab_size": facts.vocab_size,
            **{
                f"{short}_token": {"token": token, "id": token_id}
                for short, (token, token_id) in facts.special_tokens.items()
            },
            "stop_ids": list(facts.stop_ids),
            "adds_bos": facts.adds_bos,
            "has_chat_template": facts.has_chat_template,
        },
        "problems": problems,
    }
