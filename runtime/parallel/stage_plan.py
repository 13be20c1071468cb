"""Which layers each stage of a pipeline holds, as data. No torch: asked before a start.

Huang et al. 2019 (GPipe, arXiv 1811.06965): a model is cut between layers, and what its stages compute at the same time
is of different batches.
"""

import re
from dataclasses import dataclass
from itertools import accumulate

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.runtime.config import EngineConfig
from llmq.runtime.parallel.shard_plan import Range

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.", "model.norm.", "lm_head."


@dataclass(frozen=True)
class Stage:
    """Layers [layers[0], layers[1]) of a decoder; before the first of all its embedding, behind the last of all its
    final norm and its head."""

    number: int
    num_stages: int
    layers: Range

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    def holds(self, tensor_name: str, is_tied: bool) -> bool:
        """is_tied: the head is the embedding, which then both ends hold."""
        if match := _LAYER.match(tensor_name):
            return self.layers[0] <= int(match.group(1)) < self.layers[1]
        if tensor_name.startswith(_EMBEDDING):
            return self.is_first or (self.is_last and is_tied)
        return self.is_last if tensor_name.startswith((_NORM, _HEAD)) else True


@dataclass(frozen=True)
class PipelineBytes:
    """What the weights of a decoder take: of each layer, of what lies before them and of what lies behind them."""

    layers: tuple[int, ...]
    before: int
    behind: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, float_bytes: int | None = None) -> "PipelineBytes":
        """As stored, or held with floats in `float_bytes` each. A tied embedding counts at both ends."""
        architecture = checkpoint.architecture
        layers, embedding, norm, head = [0] * architecture.num_layers, 0, 0, 0
        for name, num_bytes in checkpoint.tensor_bytes(float_bytes).items():
            if match := _LAYER.match(name):
                layers[int(match.group(1))] += num_bytes
            embedding += num_bytes * name.startswith(_EMBEDDING)
            norm += num_bytes * name.startswith(_NORM)
            head += num_bytes * name.startswith(_HEAD)
        return cls(tuple(layers), embedding, norm + (embedding if architecture.tie_word_embeddings else head))

    def of_stage(self, stage: Stage) -> int:
        held = sum(self.layers[slice(*stage.layers)])
        return held + (self.before if stage.is_first else 0) + (self.behind if stage.is_last else 0)

    def stages(self, num_stages: int) -> list[Stage]:
        """With as few bytes as can be in the fullest stage; of all ways to do that, the most even one."""
        count = len(self.layers)
        sums = [0, *accumulate(self.layers)]

        def held(start: int, stop: int) -> int:
            return sums[stop] - sums[start] + (start == 0) * self.before + (stop == count) * self.behind

        fewest = [held(0, stop) for stop in range(count + 1)]  # in the fullest stage of layers [0, stop)
        for number in range(2, num_stages + 1):
            fewest = [
                min((max(fewest[cut], held(cut, stop)) for cut in range(number - 1, stop)), default=0)
                for stop in range(count + 1)
            ]
        most = fewest[count]
        # stop -> (sum of squares, borders) of the most even way to cut layers [0, stop)
        ways: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
        for _ in range(num_stages):
            ways = {
                stop: min(
                    (squares + held(cut, stop) ** 2, (*borders, stop))
                    for cut, (squares, borders) in ways.items()
                    if cut < stop and held(cut, stop) <= most
                )
                for stop in range(1, count + 1)
                if any(cut < stop and held(cut, stop) <= most for cut in ways)
            }
        _, borders = ways[count]
        return [Stage(number, num_stages, borders[number : number + 2]) for number in range(num_stages)]


def whole(num_layers: int) -> Stage:
    """The one stage of a decoder that is not cut."""
    return Stage(0, 1, (0, num_layers))


def stages_of(checkpoint: Checkpoint, num_stages: int) -> list[Stage]:
    """Balanced by the bytes of the weights as they are stored. Raises InputError for what cannot be cut so often."""
    if num_stages == 1:
        return [whole(checkpoint.architecture.num_layers)]
    check_stages(checkpoint.architecture, num_stages)
    return PipelineBytes.of(checkpoint).stages(num_stages)


def check_stages(architecture: ModelArchitecture, num_stages: int) -> None:
    """Raises InputError, with the numbers that work, for stages that a model cannot be cut into."""
    if num_stages == 1:
        return
    if architecture.family is None:
        raise InputError(
            f"--pp {num_stages}: model_type {architecture.model_type!r} runs by transformers' own code, which llmq "
            "does not cut into stages; leave --pp away"
        )
    if num_stages > architecture.num_layers:
        raise InputError(
            f"--pp {num_stages}: a stage holds one layer or more, and this model has {architecture.num_layers}; "
            f"valid: 1 to {architecture.num_layers}"
        )


def check_pipeline(config: EngineConfig) -> None:
    """Raises InputError for what does not go with a pipeline's steps, several of which are in flight."""
    stages, speculation = config.pipeline_parallel, config.speculation
    if stages == 1:
        return
    if config.slo is not None:
        raise InputError(
            f"--slo is kept one step at a time, and --pp {stages} computes {stages} at once: leave one out"
        )
    if speculation is None:
        return
    if speculation.adaptive:
        raise InputError(
            f"--speculative auto times steps one by one, and --pp {stages} computes {stages} at once: name ngram or "
            "medusa, or leave one out"
        )
    if speculation.method not in ("ngram", "medusa"):
        raise InputError(
            f"--speculative {speculation.method}: a drafter with layers of its own does not run beside a stage "
            f"(--pp {stages}); ngram and medusa do"
        )
