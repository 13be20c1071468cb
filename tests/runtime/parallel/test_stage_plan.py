"""Which stage holds which layers: as little as the fullest can hold, every tensor somewhere, words for the rest."""

import itertools
import json
import random

import pytest
import torch
from family_cases import CASES
from published_configs import LLAMA_70B
from tiny_model import save_tiny_model

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.slo import Slo
from llmq.runtime.config import EngineConfig, Speculation
from llmq.runtime.kv_store import KVStore
from llmq.runtime.parallel.rank import Rank
from llmq.runtime.parallel.stage_plan import PipelineBytes, Stage, check_pipeline, check_stages, stages_of


def cuts(num_layers: int, num_stages: int):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        borders = (0, *inner, num_layers)
        yield [Stage(number, num_stages, borders[number : number + 2]) for number in range(num_stages)]


@pytest.mark.parametrize("seed", range(60))
def test_no_other_way_to_cut_has_a_smaller_fullest_stage_or_is_more_even(seed):
    rng = random.Random(seed)
    num_layers = rng.randrange(1, 9)
    num_stages = rng.randrange(1, num_layers + 1)
    sizes = PipelineBytes(tuple(rng.randrange(1, 9) for _ in range(num_layers)), rng.randrange(20), rng.randrange(20))

    def cost(stages: list[Stage]) -> tuple[int, int]:
        held = [sizes.of_stage(stage) for stage in stages]
        return max(held), sum(one**2 for one in held)

    made = sizes.stages(num_stages)
    assert cost(made) == min(cost(stages) for stages in cuts(num_layers, num_stages))
    assert [stage.number for stage in made] == list(range(num_stages))
    assert sum(sizes.of_stage(stage) for stage in made) == sum(sizes.layers) + sizes.before + sizes.behind


def test_an_embedding_as_large_as_layers_leaves_its_stage_fewer():
    """As in 4 bits, where it is in 16: of 80 layers of 10 and ends of 50 no stage of four takes more than 230."""
    made = PipelineBytes((10,) * 80, 50, 50).stages(4)
    assert [stage.layers for stage in made] == [(0, 17), (17, 39), (39, 62), (62, 80)]


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=repr)
def test_every_tensor_of_every_family_is_in_one_stage_and_a_tied_embedding_in_two(tmp_path, model_type, changes):
    checkpoint = read_checkpoint(save_tiny_model(tmp_path, model_type, **changes))
    is_tied = checkpoint.architecture.tie_word_embeddings
    stages = stages_of(checkpoint, 2)
    for name in checkpoint.tensors:
        holders = sum(stage.holds(name, is_tied) for stage in stages)
        assert holders == (2 if is_tied and "embed_tokens" in name else 1), name
    sizes = PipelineBytes.of(checkpoint)
    twice = checkpoint.tensors["model.embed_tokens.weight"].num_bytes if is_tied else 0
    assert sum(sizes.of_stage(stage) for stage in stages) == checkpoint.total_bytes + twice


def refused(config: dict, num_stages: int) -> str:
    with pytest.raises(InputError) as raised:
        check_stages(ModelArchitecture.from_config(config), num_stages)
    return str(raised.value)


def test_what_cannot_be_cut_is_refused_with_what_can():
    said = refused(LLAMA_70B, 81)
    assert said == "--pp 81: a stage holds one layer or more, and this model has 80; valid: 1 to 80"
    assert "transformers' own code" in refused({**LLAMA_70B, "model_type": "stablelm"}, 2)
    check_stages(ModelArchitecture.from_config(LLAMA_70B), 80)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slo": Slo.parse("tpot=50ms")}, "--slo is kept one step at a time, and --pp 2 computes 2 at once"),
        ({"speculation": Speculation(method="ngram", adaptive=True)}, "--speculative auto times steps one by one"),
        ({"speculation": Speculation(method="draft", draft_model="d")}, "--speculative draft: .* ngram and medusa do"),
        ({"speculation": Speculation(method="eagle", draft_model="d")}, "--speculative eagle: .*--pp 2"),
    ],
)
def test_what_does_not_go_with_stages_is_refused_in_words(changes, words):
    check_pipeline(EngineConfig(model="m", **changes))
    check_pipeline(EngineConfig(model="m", pipeline_parallel=2, speculation=Speculation(method="ngram")))
    with pytest.raises(InputError, match=words):
        check_pipeline(EngineConfig(model="m", pipeline_parallel=2, **changes))


def test_the_ranks_that_the_first_one_drives_are_of_the_stage_that_samples():
    config = EngineConfig(model="m", tensor_parallel=2, pipeline_parallel=3)
    places = [Rank.of(config, number) for number in range(6)]
    assert [rank.link.stage for rank in places] == [2, 2, 1, 1, 0, 0]
    assert [rank.collectives.rank for rank in places] == [0, 1, 0, 1, 0, 1]
    alone = Rank.of(EngineConfig(model="m"), 0)
    assert (alone.collectives, alone.link) == (None, None)


def test_one_block_table_serves_stages_with_other_layers(tmp_path):
    """Six layers, every second of them with a window, cut so that the kinds are unevenly spread."""
    folder = save_tiny_model(
        tmp_path,
        "gemma2",
        num_hidden_layers=6,
        layer_types=["sliding_attention"] * 4 + ["full_attention"] * 2,
        sliding_window=32,
    )
    assert json.loads((folder / "config.json").read_text())["layer_types"][3] == "sliding_attention"
    whole = KVCacheLayout.of(read_checkpoint(folder).architecture, "bf16")
    parts = [whole.of_layers(start, stop) for start, stop in ((0, 3), (3, 5), (5, 6))]
    for part in parts:
        assert [group.block_tokens for group in part.groups] == [group.block_tokens for group in whole.groups]
        assert [group.spec for group in part.groups] == [group.spec for group in whole.groups]
    assert [[group.layers for group in part.groups] for part in parts] == [
        [(0, 1, 2), ()],
        [(0,), (1,)],
        [(), (0,)],
    ]
    assert sum(part.bytes_per_token for part in parts) == whole.bytes_per_token
    # A block is as large as the group that needs most: of a stage without layers of a kind, its blocks lie unused.
    stores = [KVStore(part, 5, torch.device("meta")) for part in parts]
    assert [store.num_bytes for store in stores] == [
        5 * max(group.block_tokens * group.bytes_per_token for group in part.groups) for part in parts
    ]
