"""How much each linear's rounding costs the whole model, at each scheme it could have.

One measurement a unit (linears that share a scheme): the damage of rounding it to the coarsest candidate and nothing
else. For the finer ones it is scaled by the error of the unit's output: to second order the divergence of the
next-token distribution is a quadratic form of the perturbation (the Fisher metric; its first-order term is zero at the
original), and rounding errors of one weight at different schemes point in random directions of the same space, so that

    damage(scheme) ≈ damage(coarsest) · E|ΔW(scheme) x|² / E|ΔW(coarsest) x|²

What the measure is, is the caller's: `Damage` gets dense weights by name and says what they cost. Nothing here runs a
model's head or knows of a runtime.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llmq.profiles.progress import Progress, silent
from llmq.quantize.activation_store import ActivationStore
from llmq.quantize.bit_allocation import Choice, Unit
from llmq.quantize.bit_search import SharedScheme
from llmq.quantize.calibration import CalibrationSet
from llmq.quantize.layer_stream import LayerStream
from llmq.quantize.layer_work import InputStatistics, LayerWork
from llmq.quantize.preflight import Plan
from llmq.quantize.rounding import round_trip
from llmq.quantize.sizes import DEFAULT_MEMORY_BYTES, DTYPE_BYTES, linear_bytes
from llmq.quantize.targets import DECODER_PREFIX
from llmq.quantize.work_folder import work_path

# {linear: weight [out, in], float32} -> what the model loses with these, in nats a token (0: nothing)
Damage = Callable[[Mapping[str, Tensor]], float]


@torch.no_grad()
def measure_sensitivity(
    plan: Plan,
    space: Sequence[SharedScheme],
    calibration: CalibrationSet,
    damage: Damage,
    *,
    device: torch.device | str = "cpu",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress = silent,
) -> list[Unit]:
    """A `Unit` for each member of `space`, in its order: what each of its schemes costs in bytes and in damage.

    The samples run through the original model, one layer in memory; `damage` is called once for each unit.
    memory_bytes: of activations that are held in memory; the rest goes into a file beside `plan.out`.
    """
    stream = LayerStream(plan.source, torch.device(device))
    spill = work_path(plan.out).with_suffix(".activations")
    store = ActivationStore(stream.embed(calibration.samples), spill, memory_bytes)
    by_layer: dict[int, list[SharedScheme]] = {}
    for shared in space:
        by_layer.setdefault(shared.targets[0].layer, []).append(shared)
    units: dict[str, Unit] = {}
    try:
        for index in range(max(by_layer) + 1):
            with stream.layer(index) as layer:
                run = partial(stream.run_as_served, index, layer)
                work = LayerWork(
                    layer=layer,
                    schemes={},
                    mappings=(),
                    samples=store,
                    run=partial(stream.run, index, layer),
                    run_as_served=run,
                    dtype=getattr(torch, plan.dtype),
                    head_dim=plan.source.architecture.head_dim,
                )
                of_layer = by_layer.get(index, [])
                prefix = f"{DECODER_PREFIX}{index}."
                names = [target.name.removeprefix(prefix) for shared in of_layer for target in shared.targets]
                statistics = work.measure(names) if names else {}
                for shared in of_layer:
                    progress("measuring sensitivity", len(units), len(space), unit="groups of linears")
                    units[shared.name] = _measure(plan, shared, work, statistics, prefix, damage)
                if index < max(by_layer):
                    for number in range(len(store)):
                        store[number] = run(store[number]).to("cpu")
    finally:
        store.close()
        spill.unlink(missing_ok=True)
    progress("measuring sensitivity", len(space), len(space), unit="groups of linears")
    return [units[shared.name] for shared in space]


def _measure(
    plan: Plan,
    shared: SharedScheme,
    work: LayerWork,
    statistics: Mapping[str, InputStatistics],
    prefix: str,
    damage: Damage,
) -> Unit:
    energies: dict[str, float] = {}
    coarsest: tuple[float, dict[str, Tensor]] = (0.0, {})
    for label, scheme in shared.schemes.items():
        rounded, energy = {}, 0.0
        for target in shared.targets:
            name = target.name.removeprefix(prefix)
            weight = work.linear(name).weight
            rounded[target.name] = round_trip(weight, scheme, work.dtype)
            delta = rounded[target.name] - weight
            energy += float(torch.sum((delta @ statistics[name].gram) * delta, dtype=torch.float64))
        energies[label] = energy
        if energy > coarsest[0]:
            coarsest = energy, rounded
    largest, weights = coarsest
    cost = max(0.0, damage(weights)) if weights else 0.0
    element_bytes = DTYPE_BYTES[plan.dtype]
    choices = tuple(
        Choice(
            label,
            sum(linear_bytes(target, scheme, element_bytes, plan.recipe.format) for target in shared.targets),
            cost * energies[label] / largest if weights else 0.0,
        )
        for label, scheme in shared.schemes.items()
    )
    return Unit(shared.name, choices)


def save_units(units: Sequence[Unit], identity: Mapping[str, object], path: Path) -> None:
    """Keep a measurement, and what it is of, for a command that is interrupted afterwards."""
    partial_path = path.with_suffix(".partial")
    content = {"identity": identity, "units": [asdict(unit) for unit in units]}
    partial_path.write_text(json.dumps(content), encoding="utf-8")
    partial_path.replace(path)


def load_units(identity: Mapping[str, object], path: Path) -> list[Unit] | None:
    """The units that `save_units` kept of the same thing; None where there are none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["identity"] != json.loads(json.dumps(identity)):
            return None
        return [Unit(unit["name"], tuple(Choice(**choice) for choice in unit["choices"])) for unit in content["units"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
