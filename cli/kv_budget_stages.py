"""`llmq kv-budget --pp`: what a rank of each stage holds, and which of them holds the fewest blocks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.profiles.budget import Budget, Memory, StageBudget
from llmq.profiles.checkpoint import has_weights, read_checkpoint
from llmq.runtime.parallel.stage_plan import PipelineBytes, check_stages, stages_of

if TYPE_CHECKING:
    from llmq.profiles.weight_size import WeightSize
    from llmq.runtime.dtypes import Dtypes

FLOAT_BYTES = 2  # of an embedding, by config.json


def with_stages(
    budget: Budget,
    pp: int,
    path: Path,
    dtypes: "Dtypes",
    memory_beside: Callable[[int], Memory | None],
    *,
    as_stored: bool,
) -> Budget:
    """`budget` of the stage that holds the fewest blocks, and what every one holds. `memory_beside`: of a rank, by its
    weights in bytes. as_stored: the weights are those of the folder. Raises InputError for what cannot be cut so."""
    architecture, layout = budget.architecture, budget.layout
    check_stages(architecture, pp)
    if as_stored and has_weights(path):
        checkpoint = read_checkpoint(path)
        cut, sizes = stages_of(checkpoint, pp), PipelineBytes.of(checkpoint, dtypes.float_bytes)
    else:
        sizes = _estimated(budget.weights, architecture.num_layers, architecture.vocab_size * architecture.hidden_size)
        cut = sizes.stages(pp)
    stages, memories = [], []
    for stage in cut:
        weight_bytes = -(-sizes.of_stage(stage) // budget.ranks) if budget.weights else 0
        stages.append(StageBudget(stage.layers, layout.of_layers(*stage.layers), weight_bytes))
        memories.append(memory_beside(weight_bytes))

    def room(number: int) -> tuple[int, int, int]:
        held = stages[number]
        blocks = 0 if memories[number] is None else held.layout.num_blocks(memories[number].kv_cache_bytes)
        return blocks, -held.layout.block_bytes, -held.weight_bytes

    tightest = min(range(pp), key=room)
    held = stages[tightest]
    return replace(
        budget,
        architecture=replace(architecture, attention=architecture.attention[slice(*held.layers)]),
        layout=held.layout,
        memory=memories[tightest],
        stages=tuple(stages),
        stage=tightest,
    )


def _estimated(weights: "WeightSize | None", num_layers: int, num_embedded: int) -> PipelineBytes:
    """Layers alike, beside an embedding and a head in 16 bit; where nothing is known of them, layers alone."""
    ends = FLOAT_BYTES * num_embedded
    if weights is None or weights.num_bytes <= 2 * ends:
        each = 1 if weights is None else -(-weights.num_bytes // num_layers)
        return PipelineBytes((each,) * num_layers, 0, 0)
    return PipelineBytes((-(-(weights.num_bytes - 2 * ends) // num_layers),) * num_layers, ends, ends)
