import json

import pytest

from llmq.profiles.errors import InputError
from llmq.profiles.families import FAMILIES
from llmq.profiles.linear_shape import UnknownWeightsError
from llmq.profiles.weight_size import (
    linear_shapes,
    other_parameters,
    parameter_count,
    parse_storage,
    storage_bytes,
    weight_size,
)
from llmq.profiles.weight_storage import WEIGHT_SHAPE_BYTES

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def smollm2_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


def test_parameters_of_smollm2():
    assert parameter_count(SMOLLM2) == 134_515_008


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("meta-llama--Meta-Llama-3.1-8B", 8_030_261_248),
        ("meta-llama--Meta-Llama-3.1-70B", 70_553_706_496),
        ("Qwen--Qwen3-0.6B", 596_049_920),
        ("Qwen--Qwen3-8B", 8_190_735_360),
        ("Qwen--Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen--Qwen3-235B-A22B", 235_093_634_560),
        ("mistralai--Mixtral-8x7B-v0.1", 46_702_792_704),
    ],
)
def test_parameters_of_published_models(shared, model, parameters):
    config = json.loads((shared / "data" / "configs" / "verbatim" / f"{model}_config.json").read_text())
    assert parameter_count(config) == parameters


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
MLA = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
DELTA = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
SPARSE_DELTA = {**DELTA, "num_experts": 8, "shared_expert_intermediate_size": 40}
MAMBA = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 10,
    "n_groups": 2,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 56,
    "layers_block_type": ["mamba", "attention", "moe", "mamba"],
}
BIASED = {**SMALL, "attention_bias": True}
DSA = {**MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v2", **MLA},
        {"model_type": "deepseek_v2", **MLA, "q_lora_rank": None, "attention_bias": True},
        {"model_type": "deepseek_v3", **MLA},
        {"model_type": "deepseek_v3", **MLA, "attention_bias": True, "tie_word_embeddings": True},
        {"model_type": "deepseek_v32", **DSA},
        {"model_type": "glm_moe_dsa", **DSA, "indexer_types": ["full", "shared", "full"]},
        {"model_type": "glm4_moe", **SMALL, "head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1},
        {"model_type": "glm4_moe", **SMALL, "head_dim": 32, "n_routed_experts": 8, "use_qk_norm": True},
        {"model_type": "minimax_m2", **SMALL, "head_dim": 32, "num_local_experts": 8},
        {"model_type": "gpt_oss", **SMALL, "head_dim": 32, "num_local_experts": 8},
        {"model_type": "glm4_moe_lite", **MLA, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {
            "model_type": "dots1",
            **SMALL,
            "head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
        {"model_type": "ministral", **SMALL, "head_dim": 32},
        {"model_type": "ministral3", **SMALL, "head_dim": 32},
        {"model_type": "olmo3", **SMALL, "attention_bias": True},
        {"model_type": "olmoe", **SMALL, "num_experts": 8},
        {"model_type": "granitemoe", **SMALL, "num_local_experts": 8},
        {"model_type": "qwen2_moe", **SMALL, "num_experts": 8, "shared_expert_intermediate_size": 80},
        {"model_type": "gemma", **SMALL, "head_dim": 32},
        {"model_type": "helium", **SMALL, "head_dim": 16},
        {"model_type": "ernie4_5", **SMALL, "head_dim": 16},
        {"model_type": "cohere", **BIASED},
        {"model_type": "cohere", **SMALL, "use_qk_norm": True},
        {"model_type": "cohere2", **SMALL, "layer_types": ["full_attention"] * 3},
        {"model_type": "glm", **SMALL, "head_dim": 16},
        {"model_type": "glm", **BIASED, "head_dim": 16, "attention_bias": False},
        {"model_type": "glm4", **BIASED, "head_dim": 16},
        {"model_type": "arcee", **BIASED, "mlp_bias": True},
        {"model_type": "nemotron", **BIASED, "mlp_bias": True},
        {"model_type": "apertus", **BIASED},
        {"model_type": "stablelm", **SMALL, "use_qkv_bias": True},
        {"model_type": "olmo", **BIASED},
        {"model_type": "phi", **SMALL},
        {"model_type": "gpt_neox", **SMALL, "num_key_value_heads": 4},
        {"model_type": "hunyuan_v1_dense", **BIASED, "head_dim": 16},
        {"model_type": "phimoe", **BIASED, "num_local_experts": 8, "lm_head_bias": True},
        {"model_type": "granitemoeshared", **SMALL, "num_local_experts": 8, "shared_intermediate_size": 40},
        {
            "model_type": "llama4_text",
            **BIASED,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 72,
            "head_dim": 16,
        },
        {
            "model_type": "llama4_text",
            **SMALL,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 72,
            "head_dim": 16,
        },
        {"model_type": "nemotron_h", **MAMBA},
        {
            "model_type": "nemotron_h",
            **MAMBA,
            "moe_latent_size": 24,
            "layers_block_type": ["mlp", "moe", "mamba", "attention"],
        },
        {"model_type": "qwen3_next", **SPARSE_DELTA},
        {"model_type": "qwen3_5_text", **DELTA},
        {"model_type": "qwen3_5_moe_text", **SPARSE_DELTA},
        {"model_type": "seed_oss", **SMALL, "head_dim": 32, "attention_bias": True, "attention_out_bias": False},
    ],
    ids=lambda config: config["model_type"],
)
def test_parameters_that_only_the_planner_counts_are_those_that_transformers_makes(config):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    choice = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert parameter_count(config) == sum(one.numel() for one in (*model.parameters(), *choice))


@pytest.mark.parametrize("changes", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"moe_layer_freq": 2}])
def test_experts_in_layers_of_their_own_choice_are_not_guessed(changes):
    config = {"model_type": "qwen2_moe", **SMALL, "num_experts": 8, "shared_expert_intermediate_size": 80}
    assert parameter_count({**config, "decoder_sparse_step": 1, "mlp_only_layers": []})
    with pytest.raises(UnknownWeightsError, match="--weights 40GiB"):
        parameter_count({**config, **changes})


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("extracted/mlc--gemma_2b", 2_506_172_416),
        ("extracted/mlc--internlm2_5_7b", 7_737_708_544),
        ("extracted/mlc--stablelm", 2_795_443_200),
        ("extracted/mlc--stablelm-2-zephyr-1_6b", 1_644_515_328),
        ("classdefault/CohereForAI--c4ai-command-r-v01", 34_980_831_232),
        ("extracted/mlc--deepseek", 16_375_728_128),
    ],
)
def test_parameters_as_the_model_cards_say(shared, model, parameters):
    config = json.loads((shared / "data" / "configs" / f"{model}.json").read_text())
    assert parameter_count(config) == parameters


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("deepseek-ai--DeepSeek-V3", 671),
        ("deepseek-ai--DeepSeek-V2-Lite", 16),
        ("moonshotai--Kimi-K2-Instruct", 1026),
        ("ByteDance-Seed--Seed-OSS-36B", 36),
        ("nvidia--Nemotron-H-56B-Base-8K", 56),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 32),
    ],
)
def test_published_sizes_of_what_only_the_planner_counts(shared, model, billions):
    config = json.loads((shared / "data" / "configs" / "verbatim" / f"{model}_config.json").read_text())
    assert round(parameter_count(config) / 1e9) == billions


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}])
def test_parameters_are_those_that_transformers_makes(model_type, changes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_local_experts": 4,
        "decoder_sparse_step": 2,
        "pad_token_id": 0,
        **changes,
    }
    if model_type == "phi3":  # its rotary check knows no head_dim of its own
        del config["head_dim"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, 269_030_016),
        ("bf16", 269_030_016),
        ("fp32", 538_060_032),
        ("40GiB", 40 * 2**30),
        ("40GB", 40 * 10**9),
    ],
)
def test_bytes_by_what_was_wanted(smollm2_config, wanted, expected):
    assert weight_size(smollm2_config, wanted).num_bytes == expected


def test_embedding_norms_and_head_stay_in_16_bit():
    embedding, norms, linears = 49_152 * 576, 61 * 576, 134_515_008 - 49_152 * 576 - 61 * 576
    rows = 30 * (576 + 192 + 192 + 576 + 1536 + 1536 + 576)
    fp8 = storage_bytes(SMOLLM2, parse_storage("fp8", SMOLLM2))
    assert fp8 == 2 * (embedding + norms) + linears + 2 * rows
    w4 = storage_bytes(SMOLLM2, parse_storage("w4g64", SMOLLM2))
    assert w4 == 2 * (embedding + norms) + linears // 2 + 2 * linears // 64 + 16 * 210


def test_a_packed_zero_point_makes_4_156_bits_of_4_125():
    """W4 in groups of 128: 16 bits of scale a group, and 4 of a zero point where it is not symmetric."""
    wide = {**SMOLLM2, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32}
    linears = linear_shapes(wide)
    weights = sum(one.out_features * one.in_features * one.count for one in linears)
    headers = WEIGHT_SHAPE_BYTES * sum(one.count for one in linears)
    for scheme, bits in (("w4g128", 4.125), ("w4g128-asym", 4.15625)):
        stored = storage_bytes(wide, parse_storage(scheme, wide)) - 2 * other_parameters(wide) - headers
        assert 8 * stored / weights == bits


def test_the_parts_are_the_sum(smollm2_config, bf16_folder):
    for size in (weight_size(smollm2_config, "w4g64"), weight_size(smollm2_config), weight_size(bf16_folder)):
        assert sum(num_bytes for _, num_bytes in size.parts) == size.num_bytes
    assert [what for what, _ in weight_size(bf16_folder).parts] == ["tensors in BF16"]


def test_w4_takes_the_largest_group_that_divides(smollm2_config):
    assert weight_size(smollm2_config, "w4").how.startswith("w4g64")  # 128 does not divide 576
    wide = {**SMOLLM2, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
    assert parse_storage("w4", wide).group_size == 128


def test_a_group_that_does_not_divide_is_refused_with_the_widths(smollm2_config):
    with pytest.raises(InputError, match=r"w4g128: no group of \[128\] divides all input widths \[576, 1536\]"):
        weight_size(smollm2_config, "w4g128")


def test_neither_scheme_nor_size(smollm2_config):
    with pytest.raises(InputError, match="--weights w5: give a scheme"):
        weight_size(smollm2_config, "w5")


@pytest.mark.parametrize(
    ("folder", "scheme"), [("llmc-fp8-dynamic", "fp8"), ("llmc-sq-w8a8", "int8"), ("llmc-gptq-w4a16", "w4g128")]
)
def test_the_estimate_is_what_llm_compressor_writes_to_the_byte(shared, folder, scheme):
    path = shared / "interop" / folder
    stored = weight_size(path)
    assert stored.how == "as stored"
    assert weight_size(path, scheme).num_bytes == stored.num_bytes
    # And what the config alone declares.
    assert weight_size(path / "config.json").num_bytes == stored.num_bytes


@pytest.mark.parametrize(
    "folder", ["autoawq-w4g128-gemm", "llmc-nvfp4", "llmc-mxfp4", "llmc-fp8-static", "llmc-fp8-kv"]
)
def test_what_a_config_alone_declares_to_the_byte(shared, folder):
    path = shared / "interop" / folder
    kv_scales = 3 * 2 * 2 if folder == "llmc-fp8-kv" else 0  # K's and V's of 3 layers, in bf16
    assert weight_size(path / "config.json").num_bytes == weight_size(path).num_bytes - kv_scales


def test_gptq_and_fp8_blocks_by_their_config(tmp_path):
    """By hand: one g_idx of int32 a linear, a scale and a zero point a group; a float32 scale a block."""
    linears = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    rest = weight_size_of(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]}) - 30 * sum(
        out * width + 4 * -(-out // 128) * -(-width // 128) for out, width in linears
    )
    assert rest == 2 * other_parameters(SMOLLM2)
    gptq = {"quant_method": "gptq", "bits": 3, "group_size": 64}
    each = (out * width * 3 // 8 + width // 64 * (2 * out + out * 3 // 8) + 4 * width for out, width in linears)
    assert weight_size_of(tmp_path, gptq) == rest + 30 * sum(each)


def weight_size_of(folder, quantization):
    path = folder / "config.json"
    path.write_text(json.dumps({**SMOLLM2, "quantization_config": quantization}))
    return weight_size(path).num_bytes


def test_mxfp4_experts_beside_attention_in_16_bit(shared):
    """gpt-oss-120b: 60.7 GiB, and the published files of 65.2 GB."""
    path = shared / "data" / "configs" / "verbatim" / "openai--gpt-oss-120b_config.json"
    size = weight_size(path)
    assert size.how == "mxfp4, by config.json"
    assert size.num_bytes == pytest.approx(65.2e9, rel=0.002)
    experts = sum(num_bytes for what, num_bytes in size.parts if "experts" in what)
    assert 8 * experts / (36 * 128 * 3 * 2880 * 2880) == 4.25


def test_a_scheme_that_only_the_weights_could_tell(tmp_path):
    config = {**SMOLLM2, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"quantized by 'bitsandbytes' .* --weights 40GiB"):
        weight_size(tmp_path)


def test_a_model_of_more_than_text_is_not_counted_as_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vlm", "text_config": SMOLLM2}))
    with pytest.raises(InputError, match="more than a text decoder"):
        weight_size(tmp_path)
    assert weight_size(tmp_path, "1GiB").num_bytes == 2**30
