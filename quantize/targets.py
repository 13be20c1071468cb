"""Which linears of a checkpoint are quantized, which are not and why: from its headers alone."""

import difflib
import re
from dataclasses import dataclass

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError

HEAD = "lm_head"
# The order of the computation, for whoever reads a list of them.
_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


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
    def layer(self) -> int:
        return int(_LAYER.search(self.name).group(1))


@dataclass(frozen=True)
class Selection:
    targets: tuple[Target, ...]
    left_alone: dict[str, str]  # linear left in 16 bit -> why


def select_targets(checkpoint: Checkpoint, ignore: tuple[str, ...] = ()) -> Selection:
    """Every linear of the decoder layers, but those that `ignore` names. The embedding, the head and the routers of
    experts stay in 16 bit.

    A pattern is `re:` and a regular expression that matches a module's name from its start (as in compressed-tensors),
    or a run of the words between the name's dots: `down_proj`, `layers.0`, `model.layers.3.mlp.up_proj`.
    Raises InputError for a pattern that matches nothing.
    """
    linears = _linears(checkpoint)
    unmatched = [pattern for pattern in ignore if not any(names(pattern, name) for name in (*linears, HEAD))]
    if unmatched:
        raise InputError(_unmatched_message(unmatched, [*linears, HEAD]))
    is_tied = HEAD + ".weight" not in checkpoint.tensors
    left_alone = {HEAD: "tied to the embedding: stored once, in 16 bit" if is_tied else "the head stays in 16 bit"}
    targets = []
    experts = checkpoint.architecture.family and checkpoint.architecture.family.experts
    for name, target in linears.items():
        if experts and name.endswith(f".{experts.router}"):
            left_alone[name] = "the router of the experts stays in 16 bit"
            continue
        pattern = next((pattern for pattern in ignore if names(pattern, name)), None)
        if pattern is None:
            targets.append(target)
        else:
            left_alone[name] = f"--ignore {pattern}"
    if not targets:
        raise InputError("nothing is left to quantize: the --ignore patterns name every linear")
    return Selection(tuple(targets), left_alone)


def names(pattern: str, module_name: str) -> bool:
    """Whether an --ignore pattern names a module; see `select_targets`."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module_name) is not None
        except re.error as error:
            raise InputError(f"--ignore {pattern!r} is no regular expression: {error}") from None
    return f".{pattern}." in f".{module_name}."


def _linears(checkpoint: Checkpoint) -> dict[str, Target]:
    linears = {}
    for name, info in checkpoint.tensors.items():
        if name.endswith(".weight") and len(info.shape) == 2 and _LAYER.search(name):
            module_name = name.removesuffix(".weight")
            linears[module_name] = Target(module_name, *info.shape, info.num_bytes)
    if not linears:
        raise InputError(f"{checkpoint.path}: no linear weight of a decoder layer in it")
    return dict(sorted(linears.items(), key=lambda item: (item[1].layer, _rank(item[1].kind), item[0])))


def _rank(kind: str) -> int:
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


def _unmatched_message(patterns: list[str], module_names: list[str]) -> str:
    # Names with the layer's number taken out: what a pattern can be near to.
    vocabulary = sorted({part for name in module_names for part in (name.rsplit(".", 1)[-1], _without_layer(name))})
    lines = []
    for pattern in patterns:
        words = re.sub(r"[^a-z_.]", "", pattern.removeprefix("re:").replace("\\", "")).strip(".")
        near = difflib.get_close_matches(words, vocabulary, n=3, cutoff=0.5)
        near += [word for word in vocabulary if words and words in word and word not in near][:3]
        lines.append(f"  {pattern!r}" + (f": near to it are {', '.join(dict.fromkeys(near))}" if near else ""))
    plural = "patterns match" if len(patterns) > 1 else "pattern matches"
    return (
        f"{len(patterns)} --ignore {plural} no linear:\n"
        + "\n".join(lines)
        + "\nA pattern is words of a name (down_proj, layers.0) or re: and a regular expression from the name's start."
    )


def _without_layer(name: str) -> str:
    """`model.layers.3.mlp.gate_proj` -> `mlp.gate_proj`."""
    return _LAYER.split(name)[-1]
