"""Which group size divides which linears: `auto` resolved, and a refusal that says who is in the way."""

from collections.abc import Sequence
from dataclasses import replace

from llmq.profiles.errors import InputError
from llmq.quantize.recipe import STANDARD_GROUP_SIZES, LinearSettings
from llmq.quantize.targets import Target


def resolve_group_size(settings: LinearSettings, targets: Sequence[Target]) -> tuple[LinearSettings, str]:
    """The settings of `targets` with a number (or "channel") for a group size, and why that one.

    Raises InputError where it does not divide the inputs of all of them.
    """
    if not settings.traits.is_grouped:
        return settings, f"--{settings.method} has one scale a row"
    if settings.group_size == "channel":
        return settings, "as asked: one group a row"
    if settings.group_size == "auto":
        dividing = _dividing_sizes(targets)
        if not dividing:
            sizes = sorted({target.in_features for target in targets})
            raise InputError(
                f"--group-size auto: none of {', '.join(map(str, STANDARD_GROUP_SIZES))} divides every target's inputs "
                f"({', '.join(map(str, sizes))}); use --group-size channel or leave some out with --ignore"
            )
        return replace(settings, group_size=dividing[0]), _auto_reason(dividing[0], targets)
    offenders = [target for target in targets if target.in_features % settings.group_size]
    if offenders:
        raise InputError(_does_not_divide(settings.group_size, offenders, targets))
    return settings, "as asked"


def _dividing_sizes(targets: Sequence[Target]) -> list[int]:
    return [size for size in STANDARD_GROUP_SIZES if all(target.in_features % size == 0 for target in targets)]


def _auto_reason(chosen: int, targets: Sequence[Target]) -> str:
    if chosen == STANDARD_GROUP_SIZES[0]:
        return f"auto: {chosen} divides every target"
    larger = STANDARD_GROUP_SIZES[STANDARD_GROUP_SIZES.index(chosen) - 1]
    sizes = sorted({target.in_features for target in targets if target.in_features % larger})
    return f"auto: the largest of {STANDARD_GROUP_SIZES} that divides every target ({larger} does not divide {sizes})"


def _does_not_divide(size: int, offenders: Sequence[Target], targets: Sequence[Target]) -> str:
    by_inputs: dict[int, list[str]] = {}
    for target in offenders:
        kinds = by_inputs.setdefault(target.in_features, [])
        if target.kind not in kinds:
            kinds.append(target.kind)
    rows = [
        f"  {', '.join(kinds)}: {inputs} inputs = {inputs // size}·{size} + {inputs % size}"
        for inputs, kinds in sorted(by_inputs.items())
    ]
    usable = _dividing_sizes(targets)
    proposal = f"use --group-size {' or '.join(map(str, usable))} (or auto)" if usable else "use --group-size channel"
    ignore = " ".join(f"--ignore {kind}" for kinds in by_inputs.values() for kind in kinds)
    return (
        f"--group-size {size} does not divide the inputs of {len(offenders)} of {len(targets)} linears:\n"
        + "\n".join(rows)
        + f"\n{proposal}, or leave these in 16 bit: {ignore}"
    )
