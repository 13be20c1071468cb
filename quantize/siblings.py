"""Linears that run as one: whether a plan stores them alike, and which names would make it so."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from llmq.profiles.errors import InputError
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.targets import FusedSet, names, split_layer


def check_siblings(
    fused_sets: Sequence[FusedSet], schemes: Mapping[str, WeightScheme], left_alone: Mapping[str, str]
) -> None:
    """Refuse linears that run as one and are not stored alike: vLLM holds them as one weight, and loads neither two
    schemes nor a part in 16 bit.

    schemes: of each quantized linear. left_alone: linear in 16 bit -> why. Raises InputError.
    """
    differing = [fused for fused in fused_sets if len({schemes.get(name) for name in fused.members}) > 1]
    if not differing:
        return
    fused = differing[0]
    members: dict[str, list[str]] = {}
    for name in fused.members:
        scheme = schemes.get(name)
        members.setdefault(scheme.name if scheme else f"16 bit ({left_alone[name]})", []).append(name)
    more = f", and so do those of {len(differing) - 1} other sets" if len(differing) > 1 else ""
    raise InputError(
        f"{fused.name} run as one linear and must share one scheme; they have {len(members)}{more}:\n"
        + "\n".join(f"  {words}: {_few(listed)}" for words, listed in members.items())
        + f"\n{_remedy(differing, schemes)}"
    )


def ignore_patterns(wanted: Sequence[str], linears: Sequence[str]) -> list[str]:
    """Short --ignore patterns that together name the linears `wanted`, and none of the other `linears`."""
    patterns: list[str] = []
    left = dict.fromkeys(wanted)
    while left:
        for pattern in _patterns_of(next(iter(left))):
            named = [name for name in linears if names(pattern, name)]
            if set(named) <= set(wanted):
                break
        patterns.append(pattern)
        for name in named:
            left.pop(name, None)
    return patterns


def _patterns_of(name: str) -> Iterator[str]:
    """From the widest to the narrowest, which is the name itself."""
    prefix, relative = split_layer(name)
    words = relative.split(".")
    yield words[-1]
    yield relative
    for end in range(1, len(words) + 1):
        yield prefix + ".".join(words[:end])


def _remedy(differing: Sequence[FusedSet], schemes: Mapping[str, WeightScheme]) -> str:
    in_part = [name for fused in differing if any(m not in schemes for m in fused.members) for name in fused.members]
    if still_quantized := [name for name in in_part if name in schemes]:
        options = [f"--ignore {pattern}" for pattern in ignore_patterns(still_quantized, list(schemes))]
        return f"leave the rest of them in 16 bit too: {_few(options, 6, ' ')}; or quantize all of them"
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in differing[0].members)
    listed = ", ".join(f'"{kind}"' for kind in kinds)
    return f"let one `match` of the recipe name all of them, such as match = [{listed}]"


def _few(words: Iterable[str], most: int = 3, between: str = ", ") -> str:
    words = list(words)
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
