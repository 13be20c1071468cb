"""The shortest names for linears, over random choices of them."""

import random

import pytest

from llmq.quantize.siblings import ignore_patterns
from llmq.quantize.targets import names

DENSE = [
    f"model.layers.{n}.{kind}" for n in range(12) for kind in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
]
MIXTURE = [
    f"model.layers.{n}.mlp.experts.{e}.{kind}" for n in range(2) for e in range(12) for kind in ("w1", "w2", "w3")
]


@pytest.mark.parametrize("seed", range(30))
def test_they_name_what_is_wanted_and_nothing_else(seed):
    rng = random.Random(seed)
    linears = rng.choice([DENSE, MIXTURE, DENSE + MIXTURE])
    wanted = rng.sample(linears, rng.randint(1, len(linears)))
    patterns = ignore_patterns(wanted, linears)
    assert {name for name in linears if any(names(pattern, name) for pattern in patterns)} == set(wanted)


@pytest.mark.parametrize(
    ("wanted", "patterns"),
    [
        ([name for name in DENSE if name.endswith("q_proj")], ["q_proj"]),
        (MIXTURE[1:36], ["model.layers.0.mlp.experts.0.w2", "model.layers.0.mlp.experts.0.w3"]),
        ([name for name in MIXTURE if "layers.1" in name], ["model.layers.1.mlp.experts"]),
    ],
)
def test_they_are_short(wanted, patterns):
    assert ignore_patterns(wanted, DENSE + MIXTURE)[:2] == patterns
