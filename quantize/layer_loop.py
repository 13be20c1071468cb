"""The loop over a model's decoder layers: each is quantized, kept on disk, and passed by the samples, in this order."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from llmq.profiles.progress import Progress, silent
from llmq.quantize.activation_store import ActivationStore
from llmq.quantize.calibration import CalibrationSet
from llmq.quantize.kv_range import KVRange
from llmq.quantize.layer_methods import as_result, quantize_layer
from llmq.quantize.layer_result import LayerResult, load_result
from llmq.quantize.layer_stream import LayerStream, TensorReader, check_finite, experts_of
from llmq.quantize.layer_work import LayerWork
from llmq.quantize.mappings import mappings_of
from llmq.quantize.memory import release_memory
from llmq.quantize.preflight import Plan
from llmq.quantize.recipe import LinearSettings
from llmq.quantize.sizes import DEFAULT_MEMORY_BYTES
from llmq.quantize.targets import DECODER_PREFIX, Target
from llmq.quantize.work_folder import WorkFolder

# An expert that fewer calibration tokens are routed to is calibrated with all of them: the second moment of a handful
# says nothing of the others that will come.
MIN_ROUTED_TOKENS = 32


@torch.no_grad()
def run_layers(
    plan: Plan,
    calibration: CalibrationSet | None,
    device: torch.device,
    work: WorkFolder,
    progress: Progress = silent,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> None:
    """Leave a file of every decoder layer in `work`; those that are there already are not made again.

    memory_bytes: of activations that are held in memory; the rest goes into a file of `work`.
    """
    release_memory()  # what tokenizing left
    _check_beside_layers(plan)
    if calibration is None:
        _without_samples(plan, device, work, progress)
    else:
        _CalibratedLoop(plan, device, work, progress).run(calibration, memory_bytes)


def _check_beside_layers(plan: Plan) -> None:
    """The embedding, the head and the last norm: the result is refused with a NaN in them, after all the work."""
    read = TensorReader(plan.source)
    for name in plan.source.tensors:
        if not name.startswith(DECODER_PREFIX):
            check_finite(plan.source, name, read(name))


class _CalibratedLoop:
    """Each layer is calibrated on what the layers before it, already quantized, put out.

    Held at a time: one layer's weights, the statistics that its method takes, and the activations.
    """

    def __init__(self, plan: Plan, device: torch.device, work: WorkFolder, progress: Progress) -> None:
        self.plan, self.work, self.progress = plan, work, progress
        self.stream = LayerStream(plan.source, device)
        self.targets = _by_layer(plan.targets)

    def run(self, calibration: CalibrationSet, memory_bytes: int) -> None:
        store = ActivationStore(self.stream.embed(calibration.samples), _fresh(self.work.spill), memory_bytes)
        release_memory()  # what embedding a sample leaves lies between those that are held
        measures_kv = self.plan.recipe.kv is not None
        num_layers = self.stream.num_layers
        last = num_layers - 1 if measures_kv else max(self.targets)
        finished = next((index for index in range(last + 1) if not self.work.has(index)), last + 1)
        for index in range(last + 1):
            is_resumed = index < finished
            stage, done, total = ("resuming", index, finished) if is_resumed else ("quantizing", index, last + 1)
            if finished > last:
                break
            self.progress(stage, done, total, unit="layers")
            with self.stream.layer(index) as layer:
                if is_resumed:
                    result = load_result(self.work.file(index), self.plan.schemes)
                else:
                    result = self._quantize(index, layer, store)
                _apply(layer, f"{DECODER_PREFIX}{index}.", result)
                kv_range = KVRange() if measures_kv and not is_resumed else None
                if index < last or kv_range is not None:
                    self._pass(index, layer, store, kv_range)
            if kv_range is not None:
                attention = f"{DECODER_PREFIX}{index}.self_attn"
                result.kv_scales = kv_range.scales(
                    attention, self.plan.recipe.kv_scheme, getattr(torch, self.plan.dtype)
                )
            if not is_resumed:
                self.work.save(index, result)
            del result  # or it would lie beside the next layer's weights
            release_memory()
        self.progress("quantizing", last + 1, last + 1, unit="layers")
        store.close()

    def _quantize(self, index: int, layer: nn.Module, store: Sequence[Tensor]) -> LayerResult:
        if not (targets := self.targets.get(index)):
            return LayerResult()
        prefix = f"{DECODER_PREFIX}{index}."
        by_name = {target.name.removeprefix(prefix): target for target in targets}
        source = self.plan.source
        routed = self._count_routed(index, layer, store)

        def work_for(chosen: dict[str, LinearSettings]) -> LayerWork:
            return LayerWork(
                layer=layer,
                schemes={name: settings.scheme for name, settings in chosen.items()},
                mappings=mappings_of(source, index),
                samples=store,
                run=partial(self.stream.run, index, layer),
                run_as_served=partial(self.stream.run_as_served, index, layer),
                dtype=getattr(torch, self.plan.dtype),
                head_dim=source.architecture.head_dim,
            )

        settings = {name: self.plan.settings[target.name] for name, target in by_name.items()}
        outcome = quantize_layer(work_for, settings, self.plan.recipe.options)
        routed_by_name = self._routed_by_linear(by_name, routed)
        result = as_result(prefix, outcome, by_name, settings, routed_by_name)
        if scarce := [expert for expert, count in enumerate(routed) if count < MIN_ROUTED_TOKENS]:
            num_tokens = sum(sample.shape[0] * sample.shape[1] for sample in store)
            result.warnings.append(_scarce_warning(prefix, scarce, routed, num_tokens))
        if (experts := experts_of(layer)) is not None:
            experts.forced = frozenset()
        return result

    def _count_routed(self, index: int, layer: nn.Module, store: Sequence[Tensor]) -> list[int]:
        """The tokens that go to each expert of the layer, none for a layer without; the scarce ones are given all."""
        if (experts := experts_of(layer)) is None:
            return []
        experts.is_counting = True
        for sample in store:
            self.stream.run_as_served(index, layer, sample)
        experts.is_counting = False
        routed = experts.routed_tokens.tolist()
        experts.forced = frozenset(expert for expert, count in enumerate(routed) if count < MIN_ROUTED_TOKENS)
        return routed

    def _routed_by_linear(self, targets: dict[str, Target], routed: list[int]) -> dict[str, int]:
        if not routed:
            return {}
        prefix = f"{self.plan.source.architecture.family.experts.experts}."
        names = [name for name in targets if name.startswith(prefix)]
        return {name: routed[int(name.removeprefix(prefix).partition(".")[0])] for name in names}

    def _pass(self, index: int, layer: nn.Module, store: ActivationStore, kv_range: KVRange | None) -> None:
        """Replace the layer's inputs by its outputs."""
        changed = {} if kv_range is None else {"past_key_values": kv_range}
        for number in range(len(store)):
            store[number] = self.stream.run_as_served(index, layer, store[number], **changed).to("cpu")


def _apply(layer: nn.Module, prefix: str, result: LayerResult) -> None:
    """Give the layer the weights that are stored: what the next ones are calibrated on, first time or resumed."""
    parameters = dict(layer.named_parameters())
    for name, weight in result.linears.items():
        parameter = parameters[f"{name.removeprefix(prefix)}.weight"]
        parameter.copy_(weight.to(parameter.device).dequantize(torch.float32))
    for name, tensor in result.changed.items():
        parameters[name.removeprefix(prefix)].copy_(tensor)


def _without_samples(plan: Plan, device: torch.device, work: WorkFolder, progress: Progress) -> None:
    """Layers from their weights alone: no forward, so no module of the architecture either."""
    read, by_layer = TensorReader(plan.source), _by_layer(plan.targets)
    for number, (index, targets) in enumerate(by_layer.items()):
        progress("quantizing", number, len(by_layer), unit="layers")
        if not work.has(index):
            work.save(index, _from_weights(plan, index, targets, read, device))
            release_memory()
    progress("quantizing", len(by_layer), len(by_layer), unit="layers")


def _from_weights(
    plan: Plan, index: int, targets: Sequence[Target], read: TensorReader, device: torch.device
) -> LayerResult:
    """One layer. Nothing but the result outlives it: the next one's weights are not read beside these."""
    prefix = f"{DECODER_PREFIX}{index}."
    for name in plan.source.tensors:
        if name.startswith(prefix):
            check_finite(plan.source, name, read(name))
    by_name = {target.name.removeprefix(prefix): target for target in targets}
    layer = nn.Module()
    for name, target in by_name.items():
        _add_linear(layer, name, read(f"{target.name}.weight").to(device))

    def work_for(chosen: dict[str, LinearSettings]) -> LayerWork:
        return LayerWork(
            layer=layer,
            schemes={name: settings.scheme for name, settings in chosen.items()},
            mappings=(),
            samples=(),
            run=_no_forward,
            run_as_served=_no_forward,
            dtype=getattr(torch, plan.dtype),
            head_dim=plan.source.architecture.head_dim,
        )

    settings = {name: plan.settings[target.name] for name, target in by_name.items()}
    outcome = quantize_layer(work_for, settings, plan.recipe.options)
    return as_result(prefix, outcome, by_name, settings, {})


def _add_linear(root: nn.Module, name: str, weight: Tensor) -> None:
    """Give a module, which needs no forward, a linear of its own in float32 under a dotted name."""
    *path, last = name.split(".")
    for word in path:
        if word not in root._modules:
            root.add_module(word, nn.Module())
        root = root.get_submodule(word)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
    root.add_module(last, linear)


def _no_forward(_: Tensor) -> Tensor:
    raise RuntimeError("a method that was said to need no calibration ran the layer")


def _by_layer(targets: Sequence[Target]) -> dict[int, list[Target]]:
    found: dict[int, list[Target]] = {}
    for target in targets:
        found.setdefault(target.layer, []).append(target)
    return dict(sorted(found.items()))


def _scarce_warning(prefix: str, scarce: list[int], routed: list[int], num_tokens: int) -> str:
    listed = ", ".join(f"{expert} ({routed[expert]} tokens)" for expert in scarce)
    return (
        f"{prefix.rstrip('.')}: the router sent fewer than {MIN_ROUTED_TOKENS} calibration tokens to {len(scarce)} of "
        f"{len(routed)} experts, which were calibrated with all {num_tokens:,} instead: {listed}"
    )


def _fresh(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path
