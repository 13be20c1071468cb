import json

import pytest

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError

BASE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "vocab_size": 1000,
}


def windows(config: dict) -> list[int | None]:
    return [layer.window for layer in ModelArchitecture.from_config(config).attention]


def test_a_declared_head_dim_wins_over_hidden_over_heads():
    assert ModelArchitecture.from_config(BASE).head_dim == 128
    assert ModelArchitecture.from_config({**BASE, "head_dim": 64}).head_dim == 64


def test_without_num_key_value_heads_every_head_has_its_own():
    assert ModelArchitecture.from_config(BASE).num_kv_heads == 32
    assert ModelArchitecture.from_config({**BASE, "num_key_value_heads": 8}).num_kv_heads == 8


def test_a_nested_text_config_is_read():
    nested = {"model_type": "some_vlm", "text_config": {**BASE, "num_key_value_heads": 2}}
    assert ModelArchitecture.from_config(nested).num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 512}, [512] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 512}, [None] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 512],
        ),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2},
            [512, None, 512, None],
        ),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2}, [512, None, 512, None]),
        ({"model_type": "gemma2", "sliding_window": 512}, [512, None, 512, None]),
        ({"model_type": "smollm3", "sliding_window": 512}, [None] * 4),
        ({"model_type": "qwen3_moe", "sliding_window": 512, "use_sliding_window": True}, [512] * 4),
    ],
)
def test_which_layers_have_a_window(changes, expected):
    assert windows({**BASE, **changes}) == expected


def test_gemma_3_without_a_period_has_a_global_layer_every_sixth():
    layers = windows({**BASE, "model_type": "gemma3_text", "sliding_window": 512, "num_hidden_layers": 26})
    assert [index for index, window in enumerate(layers) if window is None] == [5, 11, 17, 23]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "some_mla", "kv_lora_rank": 512}, "model_type 'some_mla' .* latent attention"),
        ({"model_type": "some_ssm", "layer_types": ["linear_attention", "full_attention"]}, "type linear_attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder beside"),
        ({"model_type": "openelm", "num_key_value_heads": [1, 2]}, "differ from layer to layer"),
        ({"model_type": None}, "no model_type"),
    ],
)
def test_a_cache_that_cannot_be_derived_is_refused_by_name(changes, reason):
    with pytest.raises(InputError, match=reason):
        ModelArchitecture.from_config({**BASE, **changes})


def test_an_unknown_family_of_plain_heads_is_derived():
    """For the runtime, which proves it on tokens before it serves; `kv-budget` refuses what is not known."""
    made = ModelArchitecture.from_config({**BASE, "model_type": "unheard_of", "num_key_value_heads": 4})
    assert (made.num_kv_heads, made.head_dim, made.family, made.is_known) == (4, 128, None, False)
    assert ModelArchitecture.from_config({**BASE, "model_type": "stablelm"}).is_known


def test_missing_keys_are_named():
    config = {key: value for key, value in BASE.items() if key not in ("vocab_size", "hidden_size")}
    with pytest.raises(InputError, match="hidden_size, vocab_size missing"):
        ModelArchitecture.from_config(config)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        (64, 8, [1, 2, 4, 8, 16, 32, 64]),
        (9, 3, [1, 3, 9]),
        (12, 2, [1, 2, 4, 6, 12]),
        (12, 3, [1, 3, 6, 12]),
        (28, 4, [1, 2, 4, 28]),
    ],
)
def test_tensor_parallel_sizes_that_split_heads_evenly(heads, kv_heads, expected):
    config = {**BASE, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    assert ModelArchitecture.from_config(config).valid_tensor_parallel == expected


def test_real_configs_give_the_known_bytes_a_token(shared):
    """KV bytes a token of 40 models, from another project's table: every one whose architecture llmq knows."""
    from llmq.profiles.kv_spec import KVCacheLayout

    expected = {"meta-llama--Meta-Llama-3.1-8B": 131_072, "meta-llama--Meta-Llama-3.1-405B": 516_096}
    expected |= {"Qwen--Qwen3-0.6B": 114_688, "Qwen--Qwen3-8B": 147_456, "Qwen--Qwen3-32B": 262_144}
    for model, num_bytes in expected.items():
        config = json.loads((shared / "data" / "configs" / "verbatim" / f"{model}_config.json").read_text())
        assert KVCacheLayout.of(ModelArchitecture.from_config(config), "bf16").bytes_per_token == num_bytes, model
