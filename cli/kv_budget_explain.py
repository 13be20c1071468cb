"""What `llmq kv-budget --explain` prints: the arithmetic, and `--json`: the numbers alone."""

from typing import TYPE_CHECKING, Any

from llmq.cli import console
from llmq.cli.kv_budget_text import describe_states
from llmq.profiles.budget import Budget
from llmq.profiles.units import format_bytes

if TYPE_CHECKING:  # it brings numpy
    from llmq.profiles.users import Users


def explain_budget(budget: Budget) -> None:
    """The arithmetic of one rank, a line a number, to stdout."""
    where = f", on a rank of stage {budget.stage}" if budget.stages else ", on one rank" if budget.ranks > 1 else ""
    console.heading(f"How it is computed{where}")
    console.print_notes([*_explain_kv(budget), *_explain_weights(budget), *_explain_memory(budget)])


def _explain_kv(budget: Budget) -> list[str]:
    layout, arch, tokens = budget.layout, budget.architecture, budget.num_tokens
    lines = []
    for group in layout.held_groups:
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
        lines.append(f"state, whatever the length: {describe_states(arch)} = {format_bytes(layout.state_bytes)}")
    return lines


def _explain_weights(budget: Budget) -> list[str]:
    if budget.weights is None:
        return []
    parts = [f"weights, {what}: {num_bytes:,} B" for what, num_bytes in budget.weights.parts]
    split = f" / {budget.ranks} ranks = {format_bytes(budget.rank_weight_bytes)}" if budget.ranks > 1 else ""
    if budget.stages:
        split = f", on a rank of stage {budget.stage}: {budget.rank_weight_bytes:,} B"
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


def budget_json(model: str, budget: Budget, users: "Users | None") -> dict[str, Any]:
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
        "valid_tensor_parallel": list(budget.valid_ranks),
        "pipeline_parallel": max(1, len(budget.stages)),
        "stages": [
            {
                "layers": list(stage.layers),
                "weight_bytes": stage.weight_bytes or None,
                "bytes_per_token": stage.layout.bytes_per_token,
                "block_bytes": stage.layout.block_bytes,
                "reserved_bytes": stage.layout.reserved_bytes(budget.num_tokens, budget.step_tokens),
            }
            for stage in budget.stages
        ],
        "per_rank": {
            "payload_bytes_per_token": layout.payload_bytes_per_token,
            "scale_bytes_per_token": layout.scale_bytes_per_token,
            "index_bytes_per_token": layout.index_bytes_per_token,
            "late_bytes_per_token": layout.bytes_per_late_token,
            "state_bytes": layout.state_bytes,
            "sequence_bytes": budget.sequence_bytes,
            "reserved_bytes": budget.reserved_bytes,
            "uniform_bytes": budget.uniform_bytes,
            "weight_bytes": budget.rank_weight_bytes if budget.weights else None,
            "block_bytes": layout.block_bytes,
        },
        "total": {
            "bytes_per_token": budget.bytes_per_token,
            "sequence_bytes": budget.needed_bytes(budget.num_tokens) + budget.ranks * layout.state_bytes,
            "sequence_bytes_without_gqa": None if budget.stages else budget.without_gqa_bytes(),
            "weight_bytes": budget.weights.num_bytes if budget.weights else None,
        },
        "weights": budget.weights.how if budget.weights else None,
        "layers": [
            {
                "kind": arch.attention[group.layers[0]].kind,
                "layers": len(group.layers),
                "bytes_per_token": group.bytes_per_token,
            }
            for group in layout.held_groups
        ],
        "drafter": {"layers": budget.drafter_layers, "bytes_per_token": budget.drafter_bytes_per_token}
        if budget.drafter_layers
        else None,
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
