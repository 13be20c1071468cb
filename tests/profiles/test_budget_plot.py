import re
from pathlib import Path

import pytest

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.budget import Budget, whole_memory
from llmq.profiles.budget_plot import budget_page, contexts, curves
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.weight_size import WeightSize

GiB = 2**30


def budget(memory: bool = True, **more) -> Budget:
    config = {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 100,
        "max_position_embeddings": 32_768,
        **more,
    }
    architecture = ModelArchitecture.from_config(config)
    return Budget(
        architecture, KVCacheLayout.of(architecture, "bf16"), 1, 5000, WeightSize(GiB, "as given"), 512,
        whole_memory("a card", 24 * GiB, GiB) if memory else None,
    )  # fmt: skip


def test_the_curves_are_the_bytes_of_the_layout():
    made = budget(sliding_window=4096)
    one, four, *_, uniform = curves(made)
    assert contexts(made)[-1] == 32_768
    for (tokens, size), (_, of_four), (_, if_full) in zip(one.points, four.points, uniform.points, strict=True):
        assert size == made.layout.needed_bytes(tokens)
        assert of_four == 4 * size
        assert if_full == tokens * 131_072
    assert uniform.is_contrast
    assert not any(curve.is_contrast for curve in curves(budget()))


def test_the_page_stands_alone_and_names_what_it_shows():
    page = budget_page("<m>", budget(sliding_window=4096))
    assert "&lt;m&gt;: KV-cache against context, in bf16" in page
    assert "left for KV on a card: 23.0 GiB" in page
    assert "1 user, no windows" in page
    assert not re.search(r"https?://|<script|@import", page)
    assert page.count("<polyline") == 5
    assert "left for KV" not in budget_page("m", budget(memory=False))


@pytest.mark.parametrize("longest", [1, 300, 100_000])
def test_every_point_lies_inside_the_picture(longest):
    page = budget_page("m", budget(max_position_embeddings=longest))
    for points in re.findall(r'points="([^"]+)"', page):
        for pair in points.split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 860
            assert 0 <= y <= 460


def test_it_reads_nothing_of_quantize():
    source = Path(budget_page.__code__.co_filename).read_text()
    assert "llmq.quantize" not in source
