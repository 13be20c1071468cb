"""Which bits for which linears: the least damage under a size, by what each choice was measured to cost.

A unit is linears that must share a scheme (q/k/v, gate/up); a choice is a scheme for it with its bytes and its damage
(nats of KL divergence, or anything else that adds up). Choosing one for each unit is the multiple-choice knapsack
problem. Its linear relaxation is solved exactly by upgrading units along the lower convex hull of their choices in the
order of damage saved per byte (Zemel, "The linear multiple choice knapsack problem", Operations Research 1980): every
prefix of that order is optimal for the bytes it takes. What the next upgrade leaves unused is filled greedily.

    damage
      │ ●  3 bits
      │   ╲
      │     ●  4 bits g128          ● on the hull: can be chosen
      │      ╲ ○ 4 bits g32         ○ above it: never the better way to spend the bytes in between,
      │        ●─────── ● 8 bits      but taken where it fits into what is left over
      └────────────────────── bytes
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One way to store a unit. `label` is for people and for whoever maps it back to a scheme."""

    label: str
    num_bytes: int
    damage: float


@dataclass(frozen=True)
class Unit:
    name: str
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError(f"{self.name}: no choice at all")


@dataclass(frozen=True)
class Allocation:
    """`choices[i]` is of `units[i]`. `lower_bound`: no allocation of this size does less damage."""

    choices: tuple[Choice, ...]
    lower_bound: float

    @property
    def num_bytes(self) -> int:
        return sum(choice.num_bytes for choice in self.choices)

    @property
    def damage(self) -> float:
        return sum(choice.damage for choice in self.choices)


def allocate(units: Sequence[Unit], max_bytes: float) -> Allocation | None:
    """The choices with the least total damage in at most `max_bytes`; None where even the smallest take more."""
    hulls = [lower_hull(unit.choices) for unit in units]
    chosen = [hull[0] for hull in hulls]
    left = max_bytes - sum(choice.num_bytes for choice in chosen)
    if left < 0:
        return None
    lower_bound, is_bounded = sum(choice.damage for choice in chosen), False
    room = left
    for step in sorted(_steps(hulls), key=lambda step: -step.saved_per_byte):
        # The relaxation takes the first step that does not fit in part, and no further one.
        if not is_bounded:
            share = min(1.0, room / step.num_bytes)
            lower_bound -= share * step.saved_per_byte * step.num_bytes
            room -= step.num_bytes
            is_bounded = room <= 0
        if step.num_bytes <= left and chosen[step.unit] is step.before:
            chosen[step.unit] = step.after
            left -= step.num_bytes
    return Allocation(tuple(_fill(units, chosen, left)), lower_bound)


def smallest_under(units: Sequence[Unit], max_damage: float) -> Allocation | None:
    """The fewest bytes whose total damage is at most `max_damage`; None where even the least damage is more."""
    hulls = [lower_hull(unit.choices) for unit in units]
    if sum(hull[-1].damage for hull in hulls) > max_damage:
        return None
    chosen = [hull[0] for hull in hulls]
    damage = sum(choice.damage for choice in chosen)
    for step in sorted(_steps(hulls), key=lambda step: -step.saved_per_byte):
        if damage <= max_damage:
            break
        chosen[step.unit] = step.after
        damage += step.after.damage - step.before.damage
    # The last step may have saved more than was asked: spend what is over on the cheapest way back.
    bound = allocate(units, sum(choice.num_bytes for choice in chosen))
    chosen = _shrink(units, chosen, max_damage)
    return Allocation(tuple(chosen), bound.lower_bound if bound else 0.0)


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that some price of a byte makes the best, by bytes: fewer damage the more bytes, ever more slowly."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.num_bytes, choice.damage)):
        if hull and choice.damage >= hull[-1].damage:
            continue
        while len(hull) > 1 and _saved_per_byte(hull[-2], hull[-1]) <= _saved_per_byte(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


@dataclass(frozen=True)
class _Step:
    unit: int
    before: Choice
    after: Choice

    @property
    def num_bytes(self) -> int:
        return self.after.num_bytes - self.before.num_bytes

    @property
    def saved_per_byte(self) -> float:
        return _saved_per_byte(self.before, self.after)


def _saved_per_byte(before: Choice, after: Choice) -> float:
    return (before.damage - after.damage) / (after.num_bytes - before.num_bytes)


def _steps(hulls: Sequence[Sequence[Choice]]) -> list[_Step]:
    return [_Step(unit, before, after) for unit, hull in enumerate(hulls) for before, after in itertools.pairwise(hull)]


def _fill(units: Sequence[Unit], chosen: list[Choice], left: float) -> list[Choice]:
    """Spend what is left, the most damage saved first, on any choice that fits."""
    while True:
        better = [
            (now.damage - choice.damage, number, choice)
            for number, (unit, now) in enumerate(zip(units, chosen, strict=True))
            for choice in unit.choices
            if choice.damage < now.damage and choice.num_bytes - now.num_bytes <= left
        ]
        if not better:
            return chosen
        _, number, choice = max(better, key=lambda entry: entry[:2])
        left -= choice.num_bytes - chosen[number].num_bytes
        chosen[number] = choice


def _shrink(units: Sequence[Unit], chosen: list[Choice], max_damage: float) -> list[Choice]:
    """Give back bytes, the most first, while the damage stays within `max_damage`."""
    while True:
        spare = max_damage - sum(choice.damage for choice in chosen)
        smaller = [
            (now.num_bytes - choice.num_bytes, number, choice)
            for number, (unit, now) in enumerate(zip(units, chosen, strict=True))
            for choice in unit.choices
            if choice.num_bytes < now.num_bytes and choice.damage - now.damage <= spare
        ]
        if not smaller:
            return chosen
        _, number, choice = max(smaller, key=lambda entry: entry[:2])
        chosen[number] = choice
