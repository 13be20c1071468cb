"""`--target 4.25bits`, `--max-kl 0.02`: bits and group size for each linear, by what they were measured to cost."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmq.profiles.errors import InputError
from llmq.quantize.backends.registry import OWN
from llmq.quantize.bit_allocation import Allocation, Unit, allocate, smallest_under
from llmq.quantize.formats.legal import check_legal, check_together
from llmq.quantize.formats.scheme import FormatError, WeightScheme
from llmq.quantize.preflight import Plan
from llmq.quantize.recipe import METHODS, LinearSettings, Recipe
from llmq.quantize.sizes import DTYPE_BYTES, linear_bytes
from llmq.quantize.targets import Target, fused_sets

# Group sizes that a search chooses from: below 32 the scales cost more than they save.
SEARCHED_GROUP_SIZES = (128, 64, 32)
_TARGET = re.compile(r"(\d+(?:\.\d+)?) ?(?:bits?)?")


@dataclass(frozen=True)
class Goal:
    """What a search is to reach: exactly one of the two."""

    bits: float | None = None  # mean bits a weight of the quantized linears, scales and zero points included
    max_kl: float | None = None  # mean KL divergence from the original, nats a token

    @classmethod
    def of(cls, target: str | None, max_kl: float | None) -> "Goal | None":
        """From --target and --max-kl; None where neither was given. Raises InputError."""
        if target is not None and max_kl is not None:
            raise InputError("--target asks for a size, --max-kl for a quality: one of them at a time")
        if max_kl is not None:
            if not max_kl > 0:
                raise InputError(f"--max-kl {max_kl}: a number of nats above 0 is expected, such as 0.02")
            return cls(max_kl=max_kl)
        if target is None:
            return None
        if not (matched := _TARGET.fullmatch(target.strip())):
            raise InputError(f"--target {target!r}: bits a weight are expected, such as 4.25bits")
        return cls(bits=float(matched.group(1)))

    @property
    def words(self) -> str:
        if self.bits is not None:
            return f"the least damage in {self.bits:g} bits a weight"
        return f"the fewest bits with a KL divergence of at most {self.max_kl:g} nats a token"


@dataclass(frozen=True)
class SharedScheme:
    """Linears that get one scheme, for a runtime multiplies them at once, and what that can be, by its name."""

    name: str
    targets: tuple[Target, ...]
    schemes: Mapping[str, WeightScheme]


@dataclass(frozen=True)
class SearchSpace:
    shared: tuple[SharedScheme, ...]
    settings: dict[str, LinearSettings]  # by the scheme's name


def check_searchable(recipe: Recipe) -> None:
    """Raises InputError for a recipe that leaves a search nothing to choose."""
    if not recipe.traits.is_grouped:
        able = ", ".join(f"--{name}" for name, traits in METHODS.items() if traits.is_grouped)
        raise InputError(f"--{recipe.method} has one scheme only: --target and --max-kl go with {able}")
    if recipe.rules:
        raise InputError("--target and --max-kl choose for each linear, and so does --recipe's [[layers]]: use one")
    if recipe.backend != OWN:
        raise InputError(f"--target and --max-kl choose for our own methods, not for --backend {recipe.backend}")


def search_space(plan: Plan) -> SearchSpace:
    """Every number of bits that the method stores and the format holds, with every group size that divides."""
    recipe = plan.recipe
    settings = {}
    for bits in sorted(recipe.traits.bits):
        for size in SEARCHED_GROUP_SIZES:
            one = LinearSettings(recipe.method, bits, size, recipe.default.symmetric)
            settings[one.scheme.name] = one
    shared = []
    for targets in _groups(plan):
        usable = {
            name: one.scheme
            for name, one in settings.items()
            if all(_is_legal(plan, one, target) for target in targets)
        }
        if not usable:
            listed = ", ".join(map(str, SEARCHED_GROUP_SIZES))
            raise InputError(
                f"{targets[0].name}: no group size of {listed} divides its {targets[0].in_features} inputs in a way "
                f"that --format {recipe.format} stores: leave it in 16 bit with --ignore"
            )
        shared.append(SharedScheme(_common_name(targets), tuple(targets), usable))
    return SearchSpace(tuple(shared), settings)


def check_goal(plan: Plan, space: SearchSpace, goal: Goal) -> None:
    """Raise InputError for a size that no choice has, and FormatError for a format that holds no mixture of choices."""
    check_together(
        [scheme for shared in space.shared for scheme in shared.schemes.values()],
        plan.recipe.format,
        has_kv_scales=False,
    )
    if goal.bits is None:
        return
    least, most = (bound * 8 / _num_weights(plan) for bound in _bounds(plan, space))
    if not least <= goal.bits <= most:
        raise InputError(
            f"--target {goal.bits:g}bits: these linears, in {_listed_bits(space)} bits with their scales, can be from "
            f"{least:.3f} to {most:.3f} bits"
        )


def _bounds(plan: Plan, space: SearchSpace) -> tuple[int, int]:
    """The least and the most bytes of all choices."""
    element_bytes = DTYPE_BYTES[plan.dtype]
    sizes = [
        [
            sum(linear_bytes(target, scheme, element_bytes, plan.recipe.format) for target in shared.targets)
            for scheme in shared.schemes.values()
        ]
        for shared in space.shared
    ]
    return sum(map(min, sizes)), sum(map(max, sizes))


def _listed_bits(space: SearchSpace) -> str:
    bits = sorted({scheme.bits for shared in space.shared for scheme in shared.schemes.values()})
    return " or ".join(map(str, bits))


def _num_weights(plan: Plan) -> int:
    return sum(target.out_features * target.in_features for target in plan.targets)


def choose(plan: Plan, space: SearchSpace, units: Sequence[Unit], goal: Goal, correction: float = 1.0) -> Allocation:
    """The allocation for a goal. correction: measured damage over what the units' sum predicted, from an earlier try.

    Raises InputError where the goal cannot be reached, with what can.
    """
    if goal.bits is not None:
        found = allocate(units, goal.bits * _num_weights(plan) / 8)
        if found is None:
            raise InputError(f"--target {goal.bits:g}bits: these linears cannot be so small")
        return found
    found = smallest_under(units, goal.max_kl / correction)
    if found is None:
        least = sum(min(choice.damage for choice in unit.choices) for unit in units) * correction
        raise InputError(
            f"--max-kl {goal.max_kl:g}: with the most bits everywhere about {least:.2g} are to be had; leave the "
            "linears that cost most in 16 bit with --ignore, or use --fp8 or --smoothquant"
        )
    return found


def with_allocation(plan: Plan, space: SearchSpace, allocation: Allocation) -> Plan:
    """The plan with the schemes that were chosen."""
    settings = {
        target.name: space.settings[choice.label]
        for shared, choice in zip(space.shared, allocation.choices, strict=True)
        for target in shared.targets
    }
    return plan.with_settings(settings)


def _groups(plan: Plan) -> list[list[Target]]:
    """The targets, those together that runtimes run as one linear."""
    by_name = {target.name: target for target in plan.targets}
    leader = {member: fused.members[0] for fused in fused_sets(plan.source) for member in fused.members}
    groups: dict[str, list[Target]] = {}
    for name, target in by_name.items():
        groups.setdefault(leader.get(name, name), []).append(target)
    return list(groups.values())


def _is_legal(plan: Plan, settings: LinearSettings, target: Target) -> bool:
    if target.in_features % settings.group_size:
        return False
    try:
        check_legal(settings.scheme, plan.recipe.format, (target.out_features, target.in_features))
    except FormatError:
        return False
    return True


def _common_name(targets: Sequence[Target]) -> str:
    """`model.layers.3.mlp.gate_proj+up_proj`; experts of a layer by the first and their number."""
    first = targets[0].name
    if len(targets) > 4:
        return f"{first} and {len(targets) - 1} more"
    return "+".join([first, *(target.kind for target in targets[1:])])
