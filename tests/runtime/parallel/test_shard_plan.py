"""The shard plan: every number of every parameter on some rank, none twice but where it says so."""

import pytest
from family_cases import CASES, MOE
from published_configs import LLAMA_70B

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError
from llmq.quantize.formats.scheme import WeightScheme
from llmq.runtime.parallel.shard_plan import REPLICATED, ShardPlan, check_ranks, valid_ranks

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def plans(config: dict, num_ranks: int) -> list[ShardPlan]:
    architecture = ModelArchitecture.from_config(config)
    return [ShardPlan(architecture, architecture.family, config, num_ranks, rank) for rank in range(num_ranks)]


def covered(ranges) -> list[int]:
    return [number for start, stop in ranges for number in range(start, stop)]


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_heads_are_shared_out(name):
    shards = [plan.shard(f"model.layers.7.self_attn.{name}") for plan in plans(SMOLLM2, 3)]
    assert covered(rows for shard in shards for rows in shard.rows) == list(range(576 if name == "q_proj" else 192))
    assert {(shard.way, shard.columns, shard.has_bias) for shard in shards} == {("colwise", None, True)}


def test_rows_and_columns_of_an_mlp_meet():
    for plan in plans(SMOLLM2, 3):
        gate, up, down = (plan.shard(f"model.layers.0.mlp.{name}_proj") for name in ("gate", "up", "down"))
        assert gate.rows == up.rows == (down.columns,)
        assert down.has_bias == (plan.rank == 0)
    assert plans(SMOLLM2, 3)[0].shard("model.layers.0.input_layernorm") == REPLICATED
    assert plans(SMOLLM2, 1)[0].shard("model.layers.0.mlp.down_proj") == REPLICATED


def test_few_kv_heads_are_held_by_several_ranks():
    config = {**LLAMA_70B, "num_key_value_heads": 2}
    made = plans(config, 8)
    assert [plan.shard("model.layers.0.self_attn.k_proj").rows[0][0] // 128 for plan in made] == [0] * 4 + [1] * 4
    assert [plan.num_kv_heads for plan in made] == [1] * 8
    # Each rank's queries see the head that is theirs: 32 of them share one.
    assert [plan.shard("model.layers.0.self_attn.q_proj").rows[0][0] // 128 // 32 for plan in made] == [0] * 4 + [1] * 4


def test_siblings_under_one_name_are_cut_each():
    config = {**SMOLLM2, "model_type": "phi3"}
    qkv = [plan.shard("model.layers.0.self_attn.qkv_proj").rows for plan in plans(config, 3)]
    assert qkv[1] == ((192, 384), (576 + 64, 576 + 128), (768 + 64, 768 + 128))
    assert plans(config, 3)[2].shard("model.layers.0.mlp.gate_up_proj").rows == ((1024, 1536), (2560, 3072))


def test_words_are_shared_out_however_many_there_are():
    made = plans({**SMOLLM2, "vocab_size": 49151}, 3)
    assert covered(plan.vocabulary for plan in made) == list(range(49151))
    assert made[1].shard("lm_head").rows == made[1].shard("model.embed_tokens").rows == (made[1].vocabulary,)


def test_experts_are_split_on_their_own_width():
    config = {**SMOLLM2, "model_type": "qwen3_moe", **MOE, "num_attention_heads": 8, "moe_intermediate_size": 32}
    config |= {"mlp_only_layers": [0], "num_key_value_heads": 4}
    one = plans(config, 4)[1]
    assert one.shard("model.layers.2.mlp.experts.11.down_proj").columns == (8, 16)
    assert one.shard("model.layers.2.mlp.experts.3.up_proj").rows == ((8, 16),)
    assert one.shard("model.layers.0.mlp.up_proj").rows == ((384, 768),)
    assert one.shard("model.layers.2.mlp.gate") == REPLICATED


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=repr)
def test_every_family_has_a_plan(model_type, changes):
    config = {**SMOLLM2, "num_attention_heads": 8, "num_key_value_heads": 4, **changes, "model_type": model_type}
    architecture = ModelArchitecture.from_config(config)
    assert 2 in valid_ranks(architecture, config)
    check_ranks(architecture, config, 2)


def refused(config: dict, num_ranks: int, **more) -> str:
    with pytest.raises(InputError) as raised:
        check_ranks(ModelArchitecture.from_config(config), config, num_ranks, **more)
    return str(raised.value)


def test_what_cannot_be_is_refused_with_what_can():
    said = refused(SMOLLM2, 2)
    assert said == "--tp 2 does not split 9 heads, 3 KV heads and an MLP of 1536 features evenly; valid: 1, 3"
    assert "valid: 1, 2, 4, 8, 16, 32, 64" in refused(LLAMA_70B, 3)
    assert "valid: 1" in refused({**SMOLLM2, "intermediate_size": 1535}, 3)
    assert "transformers' own code" in refused({**SMOLLM2, "model_type": "stablelm"}, 3)
    wide = {"model.layers.4.mlp.down_proj": WeightScheme("int", 4, "group", 1024)}
    said = refused(SMOLLM2, 3, schemes={**wide, "model.layers.0.self_attn.o_proj": WeightScheme("int", 4, "group", 64)})
    assert "512 of the 1536 input features of mlp.down_proj, and 1024 of them belong together; valid: 1" in said
