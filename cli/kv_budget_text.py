"""What `llmq kv-budget` prints: its table, its remarks, its JSON."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    rows = [*_kv_rows(budget), []]
    if budget.memory:
        rows += _memory_rows(budget)
        rows += _user_rows(budget, users)
    console.print_table(None, columns, rows)
    console.print_notes([*_notes(budget, users, ctx), *_user_notes(users)])


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


def _row(what: str, num_bytes: int, ranks: int, form: Callable[[int], str]) -> list[str]:
    return [what, form(num_bytes)] if ranks == 1 else [what, form(num_bytes), form(num_bytes * ranks)]


def _kv_rows(budget: Budget) -> list[list[str]]:
    layout, arch, ranks = budget.layout, budget.architecture, budget.ranks
    form = format_bytes_exact if ranks == 1 else format_bytes  # three columns leave no room for both
    rows = [
        _row("KV of one token, payload", layout.payload_bytes_per_token, ranks, _in_bytes),
        _row("KV of one token, scales", layout.scale_bytes_per_token, ranks, _in_bytes),
    ]
    if layout.index_bytes_per_token:
        number = sum(layer.index_bytes > 0 for layer in arch.keys)
        rows.append(_row(f"KV of one token, {number} indexers", layout.index_bytes_per_token, ranks, _in_bytes))
    rows += [_row(f"  {what}", num_bytes, ranks, _in_bytes) for what, num_bytes in _by_kind(budget)]
    if layout.state_bytes:
        rows.append(_row(f"state of a sequence ({_states(arch)})", layout.state_bytes, ranks, form))
    rows.append(_row(f"KV of {budget.num_tokens:,} tokens{_and_state(layout)}", budget.sequence_bytes, ranks, form))
    if budget.reserved_bytes != budget.sequence_bytes:
        held = "as serve holds it" if not arch.not_run else f"of {layout.groups[0].block_tokens} tokens and more"
        rows.append(_row(f"  in whole blocks, {held}", budget.reserved_bytes, ranks, form))
    if budget.uniform_bytes != budget.sequence_bytes:
        rows.append(_row("  if no layer had a window", budget.uniform_bytes, ranks, form))
    without = budget.without_gqa_bytes()
    if without is not None and arch.num_kv_heads < arch.num_attention_heads:
        rows.append(_row(f"  without GQA ({arch.num_attention_heads} KV heads)", without // ranks, ranks, form))
    rows.append(_row(f"weights ({budget.weights.how})", budget.rank_weight_bytes, ranks, format_bytes_both))
    return rows


def _by_kind(budget: Budget) -> list[tuple[str, int]]:
    """(which layers, bytes that a token takes in them); none where all are of one kind and keep every token."""
    arch, layout = budget.architecture, budget.layout
    rows = []
    for group in layout.groups:
        kind = arch.attention[group.layers[0]].kind
        number = len(group.layers)
        rows.append((f"{number} layer{'s' * (number > 1)}, {kind}", group.bytes_per_token))
    none = sum(layer is None for layer in arch.attention)
    if none:
        rows.append((f"{none} layer{'s' * (none > 1)} without K and V of their own", 0))
    return rows if len(rows) > 1 or arch.keys[0].kind != "full attention" else []


def _states(arch: ModelArchitecture) -> str:
    counts = Counter(state.kind for state in arch.states)
    return ", ".join(f"{number} layers, {kind}" for kind, number in counts.items())


def _and_state(layout: KVCacheLayout) -> str:
    return " and the state" if layout.state_bytes else ""


def _in_bytes(num_bytes: int) -> str:
    return f"{num_bytes:,} B"


def _memory_rows(budget: Budget) -> list[list[str]]:
    memory, layout, ranks = budget.memory, budget.layout, budget.ranks
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
    return [what, *[""] * (budget.ranks > 1), value]


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
    layout, arch, dtype, notes = budget.layout, budget.architecture, _dtype(budget), []
    if ctx and ctx.strip().lower().endswith(("k", "m")):
        decimal = int(float(ctx.strip()[:-1]) * (1000 if ctx.strip().lower().endswith("k") else 1_000_000))
        size = format_bytes(layout.needed_bytes(decimal) * budget.ranks)
        notes.append(f"{ctx} is read as {budget.num_tokens:,} tokens (k = 1024); {decimal:,} tokens take {size}.")
    if arch.not_run:
        notes.append(f"serve does not run this model: it has {arch.not_run}. Blocks are those of llmq's allocator.")
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
    if budget.ranks > 1:
        notes.append(f"Valid --tp: {', '.join(map(str, arch.valid_tensor_parallel))}.")
    if budget.memory is None:
        notes.append("Give --gpu h100 or --memory 80GiB to see how many fit.")
    elif budget.memory.kv_cache_bytes < 0:
        lacking = format_bytes(-budget.memory.kv_cache_bytes)
        notes.append(
            f"The weights alone are {lacking} too large for it: more ranks (--tp) or fewer bits (--weights w4)."
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


def explain_budget(budget: Budget) -> None:
    """The arithmetic of one rank, a line a number, to stdout."""
    console.heading("How it is computed, on one rank" if budget.ranks > 1 else "How it is computed")
    console.print_notes([*_explain_kv(budget), *_explain_weights(budget), *_explain_memory(budget)])


def _explain_kv(budget: Budget) -> list[str]:
    layout, arch, tokens = budget.layout, budget.architecture, budget.num_tokens
    lines = []
    for group in layout.groups:
        spec, layers = group.spec, len(group.layers)
        heads = f"{spec.num_kv_heads} KV head{'s' * (spec.num_kv_heads > 1)}"
        if budget.ranks > 1:
            heads += f" (of {arch.attention[group.layers[0]].num_kv_heads}, {budget.ranks} ranks)"
        width = f"({spec.head_dim_k} K + {spec.head_dim_v} V)" if spec.head_dim_v else f"{spec.head_dim_k} of a latent"
        lines.append(
            f"{arch.attention[group.layers[0]].kind}: {layers} layers × {heads} × {width} × {spec.dtype.bits} bit = "
            f"{group.payload_bytes_per_token:,} B a token"
            + (f", scales {group.scale_bytes_per_token:,} B" if group.scale_bytes_per_token else "")
            + (f", indexers {group.index_bytes_per_token:,} B" if group.index_bytes_per_token else "")
        )
        kept = min(tokens, spec.window) if spec.window else tokens
        what = f"min({tokens:,}, {spec.window:,})" if spec.window else f"{tokens:,}"
        lines.append(f"  {what} tokens × {group.bytes_per_token:,} B = {format_bytes(kept * group.bytes_per_token)}")
        blocks = group.blocks_for(tokens, budget.step_tokens)
        lines.append(
            f"  in blocks of {group.block_tokens} tokens: {blocks:,} × {layout.block_bytes:,} B = "
            f"{format_bytes(blocks * layout.block_bytes)}"
        )
    if layout.state_bytes:
        lines.append(f"state, whatever the length: {_states(arch)} = {format_bytes(layout.state_bytes)}")
    return lines


def _explain_weights(budget: Budget) -> list[str]:
    parts = [f"weights, {what}: {num_bytes:,} B" for what, num_bytes in budget.weights.parts]
    split = f" / {budget.ranks} ranks = {format_bytes(budget.rank_weight_bytes)}" if budget.ranks > 1 else ""
    return [*parts, f"weights: {budget.weights.num_bytes:,} B{split}"]


def _explain_memory(budget: Budget) -> list[str]:
    memory, layout = budget.memory, budget.layout
    if memory is None:
        return []
    lines = []
    if memory.holds_weights:
        lines.append(
            f"KV: {format_bytes(memory.num_bytes)} of {memory.name} - {format_bytes(budget.rank_weight_bytes)} weights "
            f"- {format_bytes(budget.margin_bytes)} margin = {format_bytes(memory.kv_cache_bytes)}"
        )
    blocks, state = layout.blocks_for(budget.num_tokens, budget.step_tokens), layout.state_bytes
    states = f" - {format_bytes(state)} a state for each user" if state else ""
    lines.append(
        f"blocks: {memory.kv_cache_bytes:,} B{states} / {layout.block_bytes:,} B = {budget.num_blocks:,}"
        + (" (all that serve takes)" if budget.num_blocks == budget.most_blocks else "")
    )
    lines.append(f"users: {budget.num_blocks:,} blocks / {blocks:,} a sequence = {budget.num_sequences:,}")
    return lines


_FEWER_BITS = {32: "bf16", 16: "fp8", 8: "int4"}


def _does_not_fit(budget: Budget) -> str:
    """What would make one sequence fit: only what is left to try."""
    ranks = [number for number in budget.architecture.valid_tensor_parallel if number > budget.ranks]
    fewer = _FEWER_BITS.get(_dtype(budget).bits)
    remedies = [
        f"a shorter --ctx ({budget.longest_sequence:,} fit)" if budget.longest_sequence else "",
        f"more ranks (--tp {ranks[0]})" if ranks else "",
        f"fewer bits (--kv-dtype {fewer})" if fewer else "",
    ]
    words = [remedy for remedy in remedies if remedy] or ["more memory"]
    return f"Not one sequence fits: {', or '.join(words)}."


def as_json(model: str, budget: Budget, users: "Users | None") -> dict[str, Any]:
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
            "index_bytes_per_token": layout.index_bytes_per_token,
            "late_bytes_per_token": layout.bytes_per_late_token,
            "state_bytes": layout.state_bytes,
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
        "layers": [
            {
                "kind": arch.attention[group.layers[0]].kind,
                "layers": len(group.layers),
                "bytes_per_token": group.bytes_per_token,
            }
            for group in layout.groups
        ],
        "not_run": arch.not_run or None,
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
            "margin_bytes": budget.margin_bytes,
            "activation_bytes": budget.step.activation_bytes,
            "logits_bytes": budget.step.logits_bytes,
        }
    if users:
        result["users"] = {
            "trace": users.trace,
            "num_requests": users.held.num_requests,
            "num_too_long": users.held.num_too_long,
            "blocks_of_one": users.held.mean,
            "at_once": users.at_once,
            "blocks_p50": users.median_blocks,
            "blocks_p99": users.p99_blocks,
            "num_blocks": users.num_blocks,
        }
    return result
