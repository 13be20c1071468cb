"""What `llmq kv-budget` prints: its table and its remarks."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmq.cli import console
from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.budget import Budget
from llmq.profiles.kv_spec import KVCacheLayout, KVDtype
from llmq.profiles.units import format_bytes, format_bytes_both, format_bytes_exact

if TYPE_CHECKING:  # it brings numpy
    from llmq.profiles.users import Users


def print_budget(model: str, budget: Budget, users: "Users | None", ctx: str | None) -> None:
    """The table and its remarks, to stdout. `ctx`: the length as the user wrote it."""
    console.heading(f"{model}: {_describe(budget.architecture)}; KV-cache in {_dtype(budget).name}")
    columns = ["", ">"] if budget.ranks == 1 else ["", ">one rank", f">all {budget.ranks} ranks"]
    if budget.stages:
        columns = ["", f">a rank of stage {budget.stage}"]
    rows = [*_kv_rows(budget), []]
    if budget.memory:
        rows += _memory_rows(budget)
        rows += _user_rows(budget, users)
    console.print_table(None, columns, rows)
    if budget.stages:
        console.print_table(f"Each of {budget.num_ranks} ranks", *_stage_table(budget))
    console.print_notes([*_stage_notes(budget), *_notes(budget, users, ctx), *_user_notes(users)])


def _dtype(budget: Budget) -> KVDtype:
    return budget.layout.groups[0].spec.dtype


def _describe(arch: ModelArchitecture) -> str:
    """llama, 80 layers, 64 heads, 8 KV heads, head_dim 128; where layers differ, how many are of which kind."""
    shapes = {(layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v) for layer in arch.keys}
    words = f"{arch.model_type}, {arch.num_layers} layers, {arch.num_attention_heads} heads"
    kv_heads, width_k, width_v = shapes.pop()
    if shapes:
        return f"{words}, KV heads that differ"
    if not width_v:
        return f"{words}, a latent of {width_k}"
    widths = f"head_dim {width_k}" + (f" (V {width_v})" if width_v != width_k else "")
    return f"{words}, {kv_heads} KV head{'s' * (kv_heads > 1)}, {widths}"


def _num_alike(budget: Budget) -> int:
    """Ranks that hold the same as the one that is shown, beside which a column says what they hold together."""
    return 1 if budget.stages else budget.ranks


def _stage_table(budget: Budget) -> tuple[list[str], list[list[str]]]:
    columns = ["stage", "layers", ">weights", ">KV of one token", f">of {budget.num_tokens:,} tokens, in blocks"]
    rows = []
    for number, stage in enumerate(budget.stages):
        reserved = stage.layout.reserved_bytes(budget.num_tokens, budget.step_tokens)
        weights = format_bytes(stage.weight_bytes) if stage.weight_bytes else "not known"
        layers = f"{stage.layers[0]}-{stage.layers[1] - 1}"
        rows.append([str(number), layers, weights, _in_bytes(stage.layout.bytes_per_token), format_bytes(reserved)])
    return columns, rows


def _stage_notes(budget: Budget) -> list[str]:
    if not budget.stages:
        return []
    notes = ["All ranks hold equally many blocks: as many as fit beside the weights of the stage that is shown."]
    if budget.architecture.tie_word_embeddings:
        notes.append("The head is the embedding: the first stage holds it, and the last one again.")
    return notes


def _row(what: str, num_bytes: int, ranks: int, form: Callable[[int], str]) -> list[str]:
    return [what, form(num_bytes)] if ranks == 1 else [what, form(num_bytes), form(num_bytes * ranks)]


def _kv_rows(budget: Budget) -> list[list[str]]:
    layout, arch, ranks = budget.layout, budget.architecture, _num_alike(budget)
    form = format_bytes_exact if ranks == 1 else format_bytes  # three columns leave no room for both
    rows = [
        _row("KV of one token, payload", layout.payload_bytes_per_token, ranks, _in_bytes),
        _row("KV of one token, scales", layout.scale_bytes_per_token, ranks, _in_bytes),
    ]
    if budget.drafter_layers:
        what = f"  of which the drafter's {budget.drafter_layers} layers"
        rows.append(_row(what, budget.drafter_bytes_per_token, ranks, _in_bytes))
    if layout.index_bytes_per_token:
        number = sum(layer.index_bytes > 0 for layer in arch.keys)
        rows.append(_row(f"KV of one token, {number} indexers", layout.index_bytes_per_token, ranks, _in_bytes))
    rows += [_row(f"  {what}", num_bytes, ranks, _in_bytes) for what, num_bytes in _by_kind(budget)]
    if layout.state_bytes:
        rows.append(_row(f"state of a sequence ({describe_states(arch)})", layout.state_bytes, ranks, form))
    rows.append(_row(f"KV of {budget.num_tokens:,} tokens{_and_state(layout)}", budget.sequence_bytes, ranks, form))
    if budget.reserved_bytes != budget.sequence_bytes:
        held = "as serve holds it" if arch.family and not arch.not_run else "as llmq's allocator would"
        rows.append(_row(f"  in whole blocks, {held}", budget.reserved_bytes, ranks, form))
    if budget.uniform_bytes != budget.sequence_bytes:
        rows.append(_row("  if no layer had a window", budget.uniform_bytes, ranks, form))
    without = None if budget.stages else budget.without_gqa_bytes()
    if without is not None and arch.num_kv_heads < arch.num_attention_heads:
        rows.append(_row(f"  without GQA ({arch.num_attention_heads} KV heads)", without // ranks, ranks, form))
    if budget.weights:
        rows.append(_row(f"weights ({budget.weights.how})", budget.rank_weight_bytes, ranks, format_bytes_both))
    return rows


def _by_kind(budget: Budget) -> list[tuple[str, int]]:
    """(which layers, bytes that a token takes in them); none where all are of one kind and keep every token."""
    arch, layout = budget.architecture, budget.layout
    rows = []
    for group in layout.held_groups:
        kind = arch.attention[group.layers[0]].kind
        number = len(group.layers)
        rows.append((f"{number} layer{'s' * (number > 1)}, {kind}", group.bytes_per_token))
    none = sum(layer is None for layer in arch.attention)
    if none:
        rows.append((f"{none} layer{'s' * (none > 1)} without K and V of their own", 0))
    return rows if len(rows) > 1 or arch.keys[0].kind != "full attention" else []


def describe_states(arch: ModelArchitecture) -> str:
    counts = Counter(state.kind for state in arch.states)
    return ", ".join(f"{number} layers, {kind}" for kind, number in counts.items())


def _and_state(layout: KVCacheLayout) -> str:
    return " and the state" if layout.state_bytes else ""


def _in_bytes(num_bytes: int) -> str:
    return f"{num_bytes:,} B"


def _memory_rows(budget: Budget) -> list[list[str]]:
    memory, layout, ranks = budget.memory, budget.layout, _num_alike(budget)
    rows = [_row(memory.name, memory.num_bytes, ranks, format_bytes_both)]
    if memory.holds_weights:
        rows.append(_row("  weights", budget.rank_weight_bytes, ranks, format_bytes_both))
        rows.append(_row("  left for KV", memory.kv_cache_bytes, ranks, format_bytes_both))
        rows.append(_row("  margin, for what a step computes", budget.margin_bytes, ranks, format_bytes_both))
    step = budget.step
    name = f"activations of {step.step_tokens:,} tokens, about"
    rows.append(_row(f"    {name}", step.activation_bytes, ranks, format_bytes))
    rows.append(_row(f"    logits of {step.num_sequences:,} sequences", step.logits_bytes, ranks, format_bytes))
    rows.append([])
    # A block, a token and a sequence are on every rank at once, each rank with its own heads: counted once.
    tokens = " / ".join(f"{group.block_tokens}" for group in layout.groups)
    what = f"blocks of {tokens} tokens ({format_bytes(layout.block_bytes)})"
    rows.append(_once(budget, what, f"{budget.num_blocks:,}"))
    rows.append(_once(budget, "tokens that fit, in one sequence", f"{budget.longest_sequence:,}"))
    return rows


def _once(budget: Budget, what: str, value: str) -> list[str]:
    """A row of what is counted once, however many ranks there are."""
    return [what, *[""] * (_num_alike(budget) > 1), value]


def _user_rows(budget: Budget, users: "Users | None") -> list[list[str]]:
    rows = [_once(budget, f"users at once, {budget.num_tokens:,} tokens each", f"{budget.num_sequences:,}")]
    if users:
        rows.append(_once(budget, f"users at once, lengths of {users.trace}", f"{users.at_once:,}"))
        rows.append(_once(budget, "  blocks they hold, median", f"{users.median_blocks:,}"))
        rows.append(_once(budget, "  blocks they hold, 99th percentile", f"{users.p99_blocks:,}"))
    return rows


def _user_notes(users: "Users | None") -> list[str]:
    if users is None:
        return []
    held = users.held
    left_out = f"; {held.num_too_long:,} longer than that are left out" if held.num_too_long else ""
    return [
        f"With the lengths of {users.trace} ({held.num_requests:,} requests{left_out}) one user holds "
        f"{held.mean:,.1f} blocks on average, and {users.at_once:,} find enough at {users.chance:.0%} of all moments: "
        "each asks again as soon as he is answered, and steps take equally long."
    ]


def _notes(budget: Budget, users: "Users | None", ctx: str | None) -> list[str]:
    arch, dtype, notes = budget.architecture, _dtype(budget), []
    if ctx and ctx.strip().lower().endswith(("k", "m")):
        decimal = int(float(ctx.strip()[:-1]) * (1000 if ctx.strip().lower().endswith("k") else 1_000_000))
        size = format_bytes(budget.needed_bytes(decimal))
        notes.append(f"{ctx} is read as {budget.num_tokens:,} tokens (k = 1024); {decimal:,} tokens take {size}.")
    if arch.not_run:
        notes.append(f"serve does not run this model: it has {arch.not_run}. Blocks are those of llmq's allocator.")
    elif arch.family is None:
        notes.append(
            "serve runs this model by transformers' own code, or refuses it: not every code takes its attention."
        )
    if budget.num_tokens > arch.max_position_embeddings:
        notes.append(f"The model's own context is {arch.max_position_embeddings:,} tokens.")
    if dtype.bits < 16 and not dtype.scale_bytes:
        notes.append(
            "Scales are static: one for K and one for V of each layer, as a checkpoint calibrated for it stores them. "
            "Without those serve stores dynamic ones: --kv-scales dynamic."
        )
    held = sorted({max(1, budget.ranks // layer.num_kv_heads) for layer in arch.keys})
    if held[-1] > 1:
        what = "KV head" if arch.keys[0].head_dim_v else "latent"
        notes.append(f"Each {what} is held by {' or '.join(map(str, held))} ranks.")
    if len(budget.valid_ranks) > 1:
        notes.append(f"Valid --tp: {', '.join(map(str, budget.valid_ranks))}.")
    if budget.weights is None:
        notes.append("What the weights take is not known from config.json alone: say it with --weights 40GiB.")
    if budget.memory is None:
        notes.append("Give --gpu h100 or --memory 80GiB to see how many fit.")
    elif budget.memory.kv_cache_bytes < 0:
        lacking = format_bytes(-budget.memory.kv_cache_bytes)
        notes.append(
            f"The weights alone are {lacking} too large for it: more ranks (--tp, --pp) or fewer bits (--weights w4)."
        )
    elif budget.margin_bytes is not None and budget.step.num_bytes > budget.margin_bytes:
        notes.append(
            f"A step computes with about {format_bytes(budget.step.num_bytes)}, more than the margin holds: "
            "less for weights and KV (--gpu-memory-utilization)."
        )
    if budget.memory is None or budget.memory.kv_cache_bytes < 0:
        pass
    elif budget.num_blocks == budget.most_blocks:
        notes.append(
            f"serve takes no more blocks: they hold all requests that it runs at once (--max-num-seqs) at the model's "
            f"{arch.max_position_embeddings:,} tokens."
        )
    elif max(budget.num_sequences, users.at_once if users else 0) > budget.step.num_sequences:
        notes.append(f"serve runs {budget.step.num_sequences} at once unless told otherwise (--max-num-seqs).")
    elif not budget.num_sequences:
        notes.append(_does_not_fit(budget))
    return notes


_FEWER_BITS = {32: "bf16", 16: "fp8", 8: "int4"}


def _does_not_fit(budget: Budget) -> str:
    """What would make one sequence fit: only what is left to try."""
    ranks = [number for number in budget.valid_ranks if number > budget.ranks]
    fewer = _FEWER_BITS.get(_dtype(budget).bits)
    remedies = [
        f"a shorter --ctx ({budget.longest_sequence:,} fit)" if budget.longest_sequence else "",
        f"more ranks (--tp {ranks[0]})" if ranks else "",
        f"fewer bits (--kv-dtype {fewer})" if fewer else "",
    ]
    words = [remedy for remedy in remedies if remedy] or ["more memory"]
    return f"Not one sequence fits: {', or '.join(words)}."
