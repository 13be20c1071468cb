"""Which linears of a checkpoint are quantized, which are not and why: from its headers alone."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.families import DecoderFamily
from llmq.quantize.recipe import Rule

HEAD = "lm_head"
# The order of the computation, for whoever reads a list of them.
_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
DECODER_PREFIX = "model.layers."


@dataclass(frozen=True)
class Target:
    """A linear to quantize. `name` is the module's, without `.weight`."""

    name: str
    out_features: int
    in_features: int
    num_bytes: int  # of its weight as stored

    @property
    def kind(self) -> str:
        """The last word of its name: `q_proj`."""
        return self.name.rsplit(".", 1)[1]

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name

    @property
    def layer(self) -> int:
        return int(_LAYER.search(self.name).group(1))


@dataclass(frozen=True)
class Selection:
    targets: tuple[Target, ...]
    left_alone: dict[str, str]  # linear left in 16 bit -> why
    rules: dict[str, Rule]  # target -> the rule that names it, where one does


@dataclass(frozen=True)
class FusedSet:
    """Linears that runtimes run as one, so that they must be stored alike (see `siblings`)."""

    name: str  # "model.layers.3.self_attn q_proj, k_proj, v_proj"
    members: tuple[str, ...]


def select_targets(checkpoint: Checkpoint, ignore: Sequence[str] = (), rules: Sequence[Rule] = ()) -> Selection:
    """Every linear of the decoder layers, but those that `ignore` or a rule leaves out. The embedding, the head and the
    routers of experts stay in 16 bit.

    A pattern is `re:` and a regular expression that matches a module's name from its start (as in compressed-tensors),
    or a run of the words between the name's dots: `down_proj`, `layers.0`, `model.layers.3.mlp.up_proj`.
    Raises InputError for a pattern that matches nothing.
    """
    linears = _linears(checkpoint)
    patterns = [(pattern, "--ignore") for pattern in ignore]
    patterns += [(pattern, "recipe") for rule in rules for pattern in rule.patterns]
    unmatched = [entry for entry in patterns if not any(names(entry[0], name) for name in (*linears, HEAD))]
    if unmatched:
        raise InputError(_unmatched_message(unmatched, [*linears, HEAD]))
    is_tied = HEAD + ".weight" not in checkpoint.tensors
    left_alone = {HEAD: "tied to the embedding: stored once, in 16 bit" if is_tied else "the head stays in 16 bit"}
    targets, ruled = [], {}
    experts = checkpoint.architecture.family and checkpoint.architecture.family.experts
    for name, target in linears.items():
        if experts and name.endswith(f".{experts.router}"):
            left_alone[name] = "the router of the experts stays in 16 bit"
            continue
        if (pattern := next((p for p in ignore if names(p, name)), None)) is not None:
            left_alone[name] = f"--ignore {pattern}"
            continue
        rule = next((rule for rule in reversed(rules) if any(names(p, name) for p in rule.patterns)), None)
        if rule is not None and rule.settings is None:
            left_alone[name] = f"the recipe ignores {', '.join(rule.patterns)}"
            continue
        targets.append(target)
        if rule is not None:
            ruled[name] = rule
    if not targets:
        raise InputError("nothing is left to quantize: the --ignore patterns name every linear")
    return Selection(tuple(targets), left_alone, ruled)


def names(pattern: str, module_name: str) -> bool:
    """Whether an --ignore pattern names a module; see `select_targets`."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module_name) is not None
        except re.error as error:
            raise InputError(f"--ignore {pattern!r} is no regular expression: {error}") from None
    return f".{pattern}." in f".{module_name}."


def fused_sets(checkpoint: Checkpoint) -> list[FusedSet]:
    """q/k/v, gate/up, and all experts of a layer: what vLLM and our runtime run as one linear, where stored apart."""
    family = checkpoint.architecture.family or DecoderFamily()
    linears = _linears(checkpoint)
    found: dict[str, list[str]] = {}
    for name in linears:
        prefix, relative = split_layer(name)
        for siblings in (family.qkv, family.mlp_in):
            if relative in siblings and len(siblings) > 1:
                words = ", ".join(sibling.rsplit(".", 1)[1] for sibling in siblings)
                found.setdefault(f"{prefix}{relative.rsplit('.', 1)[0]} {words}", []).append(name)
        if family.experts and relative.startswith(f"{family.experts.experts}."):
            found.setdefault(f"{prefix}{family.experts.experts}", []).append(name)
    return [FusedSet(name, tuple(members)) for name, members in found.items() if len(members) > 1]


def _linears(checkpoint: Checkpoint) -> dict[str, Target]:
    linears = {}
    for name, info in checkpoint.tensors.items():
        if not _LAYER.search(name):
            continue
        if len(info.shape) > 2 and ".experts." in name:
            raise InputError(
                f"{name} holds all experts of a layer in one tensor of shape {list(info.shape)}: quantizing experts "
                "stored that way is not supported"
            )
        if name.endswith(".weight") and len(info.shape) == 2:
            if not name.startswith(DECODER_PREFIX):
                raise InputError(f"{name}: decoder layers are expected under {DECODER_PREFIX}N and nowhere else")
            module_name = name.removesuffix(".weight")
            linears[module_name] = Target(module_name, *info.shape, info.num_bytes)
    if not linears:
        raise InputError(f"{checkpoint.path}: no linear weight of a decoder layer in it")
    family = checkpoint.architecture.family
    if any(".experts." in name for name in linears) and (family is None or family.experts is None):
        raise InputError(
            f"model_type {checkpoint.architecture.model_type!r} is a mixture of experts that llmq does not know: which "
            "of its linears is the router is nobody's guess"
        )
    return dict(sorted(linears.items(), key=lambda item: (item[1].layer, _rank(item[1].kind), item[0])))


def split_layer(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up_proj` -> `model.layers.3.`, `mlp.up_proj`"""
    end = _LAYER.search(name).end()
    return name[:end], name[end:]


def _rank(kind: str) -> int:
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


def _unmatched_message(patterns: Iterable[tuple[str, str]], module_names: list[str]) -> str:
    # Names with the layer's number taken out: what a pattern can be near to.
    vocabulary = sorted({part for name in module_names for part in (name.rsplit(".", 1)[-1], _without_layer(name))})
    lines = []
    for pattern, _ in patterns:
        words = re.sub(r"[^a-z_.]", "", pattern.removeprefix("re:").replace("\\", "")).strip(".")
        near = difflib.get_close_matches(words, vocabulary, n=3, cutoff=0.5)
        near += [word for word in vocabulary if words and words in word and word not in near][:3]
        lines.append(f"  {pattern!r}" + (f": near to it are {', '.join(dict.fromkeys(near))}" if near else ""))
    plural = "patterns match" if len(lines) > 1 else "pattern matches"
    return (
        f"{len(lines)} {' and '.join(dict.fromkeys(where for _, where in patterns))} {plural} no linear:\n"
        + "\n".join(lines)
        + "\nA pattern is words of a name (down_proj, layers.0) or re: and a regular expression from the name's start."
    )


def _without_layer(name: str) -> str:
    """`model.layers.3.mlp.gate_proj` -> `mlp.gate_proj`."""
    return _LAYER.split(name)[-1]
