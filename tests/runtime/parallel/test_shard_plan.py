"""The shard plan: every number of every parameter on some rank, none twice but where it says so."""

import pytest
from family_cases import CASES, MOE
from published_configs import LLAMA_70B

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError
from llmq.quantize.formats.scheme import WeightScheme
from llmq.runtime.parallel.shard_plan import (
    REPLICATED,
    ShardPlan,
    check_ranks,
    declared_schemes,
    names_widths,
    valid_ranks,
)

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


# Qwen2 72B's MLP: 231 groups of 128.
QWEN_72B = {**LLAMA_70B, "model_type": "qwen2", "intermediate_size": 29568}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}


def compressed(*targets: str, **more) -> dict:
    groups = {f"group_{n}": {"targets": [target], "weights": WEIGHTS | more} for n, target in enumerate(targets)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, [1, 2, 4, 8, 16, 32, 64]),
        (GPTQ, [1]),
        ({**GPTQ, "desc_act": True}, [1, 2, 4, 8, 16, 32, 64]),  # columns have their groups beside them
        ({**GPTQ, "group_size": 32}, [1, 2, 4]),
        ({**GPTQ, "group_size": -1}, [1, 2, 4, 8, 16]),  # whole words of 8 numbers
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, [1, 2]),
        ({"quant_method": "fp8"}, [1, 2, 4, 8, 16, 32, 64]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, [1]),
        (compressed("Linear"), [1]),
        (compressed("Linear", actorder="group"), [1, 2, 4, 8, 16, 32, 64]),
        (compressed("re:.*layers.7.mlp.down_proj"), [1]),
        (compressed("re:.*self_attn.*"), [1, 2, 4, 8, 16, 32, 64]),  # 8,192 inputs of heads of 128
        ({**compressed("Linear"), "ignore": ["re:.*down_proj"]}, [1, 2, 4, 8, 16, 32, 64]),
        ({"quant_method": "gguf"}, [1, 2, 4, 8, 16, 32, 64]),  # its tensors tell
    ],
)
def test_config_json_tells_which_ranks_end_with_a_group(quantization, expected):
    architecture = ModelArchitecture.from_config(QWEN_72B)
    assert valid_ranks(architecture, QWEN_72B, declared_schemes(architecture, QWEN_72B, quantization)) == expected


def test_what_config_json_does_not_name_is_not_guessed():
    known = {**SMOLLM2, "model_type": "mixtral", **MOE}
    assert names_widths(ModelArchitecture.from_config(known), known)
    for config in ({**SMOLLM2, "model_type": "stablelm"}, {**SMOLLM2, "intermediate_size": None}):
        assert not names_widths(ModelArchitecture.from_config(config), config)
