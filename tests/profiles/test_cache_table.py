"""Every kind of cache from config.json alone, against the table of 40 published models where it is there."""

import json
from pathlib import Path

import pytest

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout

K = 1024


def layout(config: dict, kv_dtype: str = "bf16", **more) -> KVCacheLayout:
    return KVCacheLayout.of(ModelArchitecture.from_config(config), kv_dtype, **more)


def plain(model_type: str, layers: int, heads: int, hidden: int, **more) -> dict:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "vocab_size": 32_000,
        **more,
    }


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
MAMBA_2 = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4}
FALCON_7B = plain(
    "falcon", 32, 71, 4544, num_kv_heads=71, multi_query=True, new_decoder_architecture=False, vocab_size=65_024
)
WHISPER = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 1280,
    "decoder_layers": 32,
    "decoder_attention_heads": 20,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "vocab_size": 51_866,
}

# Configs that no file of the shared data holds, as published; those it holds are read from there.
WRITTEN = {
    "bigcode/starcoder": {
        "model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True,
        "vocab_size": 49_152, "n_positions": 8192,
    },
    "Qwen/Qwen2.5-7B": plain(
        "qwen2", 28, 28, 3584, num_key_value_heads=4, sliding_window=131_072, use_sliding_window=False
    ),
    # As published: everything else is left to the model's own code.
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    },
    "google/gemma-3-27b-it": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        },
    },
    "google/gemma-3n-E4B": {
        "model_type": "gemma3n",
        "text_config": plain("gemma3n_text", 35, 8, 2048, num_key_value_heads=2, num_kv_shared_layers=15),
    },
    "deepseek-ai/DeepSeek-V2": plain("deepseek_v2", 60, 128, 5120, **LATENT),
    "ibm-granite/granite-4.0-h-small": plain(
        "granitemoehybrid", 40, 32, 4096, num_key_value_heads=8, **MAMBA_2,
        layer_types=["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    ),
    "tencent/Hunyuan-Large": plain(
        "hunyuan", 64, 80, 6400, num_key_value_heads=8, attention_head_dim=128, head_dim=128,
        use_cla=True, cla_share_factor=2,
    ),
    "openai/whisper-large-v3": WHISPER,
}  # fmt: skip
# Names in the shared data that differ from the published ones, and files of other kinds than verbatim ones.
FILES = {
    "meta-llama/Llama-2-7b-hf": "extracted/mlc--llama2_7b.json",
    "meta-llama/Llama-2-70b-hf": "extracted/mlc--llama2_70b.json",
    "google/gemma-2-9b": "extracted/mlc--gemma2_9b.json",
    "google/gemma-2-27b": "extracted/mlc--gemma2_27b.json",
    "tiiuae/falcon-7b": "classdefault/tiiuae--falcon-7b.json",
    "mistralai/Mistral-7B-v0.1": "classdefault/mistralai--Mistral-7B-v0.1.json",
    "ai21labs/AI21-Jamba-1.5-Mini": "classdefault/ai21labs--Jamba-v0.1.json",
    "Qwen/Qwen3-Next-80B-A3B": "extracted/maxtext--qwen3_next_80b_a3b.json",
    "google/gemma-4-31B-it": "verbatim/nvidia--Gemma-4-31B-IT-NVFP4_config.json",
    "meta-llama/Llama-3.1-8B": "verbatim/meta-llama--Meta-Llama-3.1-8B_config.json",
    "meta-llama/Llama-3.1-70B": "verbatim/meta-llama--Meta-Llama-3.1-70B_config.json",
    "meta-llama/Llama-3.1-405B": "verbatim/meta-llama--Meta-Llama-3.1-405B_config.json",
    "meta-llama/Llama-4-Scout-17B-16E": "verbatim/meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json",
    "meta-llama/Llama-4-Maverick-17B-128E": "verbatim/meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": "verbatim/nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json",
}
# Here the table counts KV heads alone; a number of ranks has to divide the attention heads too (vLLM checks it first).
HEADS_DO_NOT_DIVIDE = {
    *(("tiiuae/falcon-7b", ranks) for ranks in (2, 4, 8, 16)),
    *(("Qwen/Qwen2.5-7B", ranks) for ranks in (8, 16)),
    *(("Qwen/Qwen3.5-27B", 16), ("google/gemma-3-4b-it", 16), ("google/gemma-3n-E4B", 16)),
    *(("meta-llama/Llama-4-Scout-17B-16E", 16), ("meta-llama/Llama-4-Maverick-17B-128E", 16)),
    *(("openai/whisper-large-v3", ranks) for ranks in (8, 16)),
}


def config_of(model: str, shared: Path) -> dict:
    if model in WRITTEN:
        return WRITTEN[model]
    file = FILES.get(model, f"verbatim/{model.replace('/', '--')}_config.json")
    return json.loads((shared / "data" / "configs" / file).read_text())


def published(shared: Path) -> list[dict]:
    return json.loads((shared / "planner" / "models.json").read_text())["models"]


def test_forty_published_models_to_the_byte(shared):
    """A token beyond all windows, one inside them, whole sequences with their states, in bf16 and FP8."""
    rows = published(shared)
    assert len(rows) == 40
    for row in rows:
        config = config_of(row["model"], shared)
        for kv_dtype in ("bf16", "fp8"):
            made = layout(config, kv_dtype)
            assert made.bytes_per_late_token == row[f"bytes_per_token_{kv_dtype}"], row["model"]
            assert made.bytes_per_token == row[f"bytes_per_token_in_window_{kv_dtype}"], row["model"]
            for context, expected in row[f"bytes_per_seq_{kv_dtype}"].items():
                tokens = int(context.removesuffix("(max)").replace("K", "")) * (K if "K" in context else 1)
                assert made.needed_bytes(tokens) + made.state_bytes == expected, (row["model"], kv_dtype, context)
        states = row.get("const_state_bytes_ssm_fp32")
        if states is not None:
            assert layout(config).state_bytes == states, row["model"]


def test_their_bytes_on_every_rank(shared):
    refused = set()
    for row in published(shared):
        config = config_of(row["model"], shared)
        for name, expected in row["per_rank_bytes_per_token_bf16"].items():
            ranks = int(name.removeprefix("tp"))
            if ranks in ModelArchitecture.from_config(config).valid_tensor_parallel:
                assert layout(config, tensor_parallel=ranks).bytes_per_late_token == expected, (row["model"], ranks)
            else:
                refused.add((row["model"], ranks))
    assert refused == HEADS_DO_NOT_DIVIDE


def test_every_verbatim_config_is_sized_or_refused_by_name(shared):
    refused = {}
    for path in sorted((shared / "data" / "configs" / "verbatim").glob("*_config.json")):
        if path.name.endswith("hf_quant_config.json"):
            continue
        try:
            assert layout(json.loads(path.read_text())).bytes_per_token > 0
            assert ModelArchitecture.from_config(json.loads(path.read_text())).is_known, path.name
        except InputError as error:
            refused[path.name.removesuffix("_config.json")] = str(error)
    assert sorted(refused) == [
        "deepseek-ai--DeepSeek-V4-Flash",
        "deepseek-ai--DeepSeek-V4-Pro",
        "nvidia--DeepSeek-V4-Flash-NVFP4",
        "nvidia--DeepSeek-V4-Pro-NVFP4",
        "sgl-project--DeepSeek-V4-Flash-FP8",
        "sgl-project--DeepSeek-V4-Pro-FP8",
    ]
    for message in refused.values():
        assert "'deepseek_v4'" in message or "'deepseek_ref'" in message


def test_vllm_s_own_numbers_of_heads(shared):
    """KV heads and head size as vLLM's test data has them, where a verbatim config is there."""
    truth = json.loads((shared / "data" / "configs" / "facts" / "vllm_arch_groundtruth.json").read_text())["models"]
    found = {}
    for row in truth:
        path = shared / "data" / "configs" / "verbatim" / f"{row['model'].replace('/', '--')}_config.json"
        if path.is_file() and not row["is_deepseek_mla"]:
            layers = ModelArchitecture.from_config(json.loads(path.read_text())).keys
            found[row["model"]] = {(layer.num_kv_heads, layer.head_dim_k) for layer in layers}
            assert found[row["model"]] == {(row["total_num_kv_heads"], row["head_size"])}, row["model"]
    assert len(found) >= 5


# --- by hand, without the shared data


def test_latent_attention_is_one_vector_on_every_rank():
    config = plain("deepseek_v3", 61, 128, 7168, **LATENT)
    assert layout(config).bytes_per_token == 61 * 576 * 2 == 70_272
    assert layout(config, "fp8").bytes_per_token == 35_136
    assert layout(config, tensor_parallel=8).bytes_per_token == 70_272
    # One scale a token and layer: there is no V of its own.
    assert layout(config, "int8").scale_bytes_per_token == 61 * 2


def test_an_indexer_is_apart_from_the_kv_dtype_and_not_split():
    config = plain("deepseek_v32", 61, 128, 7168, **LATENT, index_head_dim=128, index_topk=2048)
    for kv_dtype, payload in (("bf16", 70_272), ("fp8", 35_136)):
        made = layout(config, kv_dtype, tensor_parallel=8)
        assert (made.payload_bytes_per_token, made.index_bytes_per_token) == (payload, 61 * 132)
    shared_choice = {**config, "indexer_types": ["full", *["shared"] * 60]}
    assert layout(shared_choice).index_bytes_per_token == 132


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({}, 1),
        ({"multi_query": False}, 71),
        ({"new_decoder_architecture": True, "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192}, 8),
    ],
)
def test_falcon_s_rule_for_its_kv_heads(changes, heads):
    assert ModelArchitecture.from_config({**FALCON_7B, **changes}).num_kv_heads == heads
    assert layout({**FALCON_7B, **changes}).bytes_per_token == 32 * 2 * heads * 64 * 2


def test_layers_that_differ_in_heads_widths_and_windows():
    config = plain(
        "mimo_v2_flash", 48, 64, 4096, num_key_value_heads=4, head_dim=192, v_head_dim=128, sliding_window=128,
        swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128,
        hybrid_layer_pattern=[0 if layer in (0, 5, 11, 17, 23, 29, 35, 41, 47) else 1 for layer in range(48)],
    )  # fmt: skip
    made = layout(config)
    assert made.bytes_per_late_token == 9 * 4 * (192 + 128) * 2 == 23_040
    assert made.bytes_per_token == 23_040 + 39 * 8 * (192 + 128) * 2


def test_chunks_hold_at_most_a_chunk_and_a_step():
    config = plain("llama4_text", 48, 40, 5120, num_key_value_heads=8, head_dim=128, attention_chunk_size=8192)
    made = layout(config)
    chunks, full = sorted(made.groups, key=lambda group: group.spec.window is None)
    assert (len(chunks.layers), len(full.layers), chunks.spec.chunked) == (36, 12, True)
    assert made.needed_bytes(100_000) == full.bytes_per_token * 100_000 + chunks.bytes_per_token * 8192
    # A step of 1 computes at most the last token of a chunk; one of 512 reaches 511 into the next.
    assert chunks.blocks_for(100_000, 1) == 8192 // chunks.block_tokens
    assert chunks.blocks_for(100_000, 512) == -(-(8192 + 511) // chunks.block_tokens)


def test_shared_layers_keep_nothing_of_their_own():
    config = plain("gemma3n_text", 35, 8, 2048, num_key_value_heads=2, head_dim=256, sliding_window=512)
    architecture = ModelArchitecture.from_config(config)
    assert [layer is None for layer in architecture.attention] == [False] * 20 + [True] * 15
    assert layout(config).bytes_per_token == 20 * 2 * 2 * 256 * 2
    pairs = plain("hunyuan", 64, 80, 6400, num_key_value_heads=8, head_dim=128, use_cla=True, cla_share_factor=2)
    assert layout(pairs).bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert layout({**pairs, "use_cla": False}).bytes_per_token == 64 * 2 * 8 * 128 * 2


def test_states_are_constant_and_split_over_ranks():
    config = plain(
        "qwen3_next", 48, 16, 2048, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip
    made = layout(config)
    conv, matrix = 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128
    assert made.state_bytes == 36 * (2 * conv + 4 * matrix)
    assert made.bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert layout(config, tensor_parallel=8).state_bytes * 8 == made.state_bytes
    assert layout({**config, "mamba_ssm_dtype": "bfloat16"}).state_bytes == 36 * 2 * (conv + matrix)


def test_one_group_of_mamba_2_is_on_every_rank():
    config = WRITTEN["ibm-granite/granite-4.0-h-small"]
    inner, groups, state = 128 * 64, 2 * 128, 128 * 64 * 128
    assert layout(config).state_bytes == 36 * (3 * 2 * (inner + groups) + 4 * state)
    assert layout(config, tensor_parallel=4).state_bytes == 36 * (3 * 2 * (inner // 4 + groups) + state)


def test_an_encoder_s_keys_are_constant():
    made = layout(WHISPER)
    assert made.bytes_per_token == 32 * 2 * 20 * 64 * 2
    assert made.state_bytes == 1500 * made.bytes_per_token
    assert layout(WHISPER, "fp8").state_bytes == 1500 * made.bytes_per_token // 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (plain("deepseek_v3", 2, 16, 2048), "kv_lora_rank is None"),
        (plain("deepseek_v4", 2, 16, 2048, index_topk=512), "'deepseek_v4' .* sparse attention"),
        (plain("qwen3_next", 2, 16, 2048, layer_types=["new_kind", "full_attention"]), "of type new_kind"),
        (plain("gpt_oss", 4, 16, 2048, layer_types=["full_attention"]), "layer_types names 1 of 4 layers"),
        ({"model_type": "nemotron_h", "hidden_size": 8}, "neither num_hidden_layers nor"),
    ],
)
def test_what_cannot_be_read_is_refused(config, reason):
    with pytest.raises(InputError, match=reason):
        layout(config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (plain("deepseek_v3", 2, 16, 2048, **LATENT), "'deepseek_v3' .* latent attention"),
        (FALCON_7B, "'falcon' .* own rule"),
        (WHISPER, "'whisper' .* encoder"),
        (WRITTEN["google/gemma-3n-E4B"], "'gemma3n_text' .* share"),
        (WRITTEN["google/gemma-3-4b-it"], "'gemma3_text' .* no num_attention_heads, vocab_size in config.json"),
        (WRITTEN["ibm-granite/granite-4.0-h-small"], "'granitemoehybrid' .* state"),
    ],
)
def test_what_is_sized_but_not_run_stays_refused_where_it_would_run(config, reason, bf16_folder):
    """`serve`, `eval` and `quantize` read Checkpoint.architecture; `kv-budget` does not."""
    from llmq.profiles.checkpoint import read_checkpoint

    (bf16_folder / "config.json").write_text(json.dumps(config))
    assert layout(config).bytes_per_token > 0
    with pytest.raises(InputError, match=reason):
        _ = read_checkpoint(bf16_folder).architecture
