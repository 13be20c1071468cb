"""The issue's numbers and cases C27 and C28, from the class that the runtime allocates by."""

import pytest

from llmq.profiles.architecture import AttentionLayer, ModelArchitecture
from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout

GiB, MiB = 2**30, 2**20


def architecture(layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int = 8192) -> ModelArchitecture:
    return ModelArchitecture.from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": 32_000,
        }
    )


LLAMA_70B = architecture(80, 64, 8, 128)


def test_the_documents_model():
    layout = KVCacheLayout.of(LLAMA_70B, "bf16")
    assert layout.bytes_per_token == 327_680
    assert layout.needed_bytes(4096) == 1.25 * GiB
    assert round(layout.needed_bytes(256_000) / GiB, 1) == 78.1
    assert layout.needed_bytes(262_144) == 80 * GiB


def test_fp8_is_half_and_its_scales_are_a_row_of_their_own():
    static = KVCacheLayout.of(LLAMA_70B, "fp8")
    assert static.payload_bytes_per_token == 327_680 // 2
    assert static.scale_bytes_per_token == 0
    dynamic = KVCacheLayout.of(LLAMA_70B, "fp8", dynamic_scales=True)
    assert dynamic.payload_bytes_per_token == static.payload_bytes_per_token
    assert dynamic.scale_bytes_per_token == 2 * 2 * 8 * 80
    assert dynamic.bytes_per_token == dynamic.payload_bytes_per_token + dynamic.scale_bytes_per_token


def test_int8_has_a_scale_for_each_token_and_head():
    # vLLM's per-token-head INT8 KV-cache of Llama-2-70B: 168,960 B/token with 4-byte scales; ours are of 2.
    assert KVCacheLayout.of(LLAMA_70B, "int8").bytes_per_token == 163_840 + 2 * 2 * 8 * 80
    assert KVCacheLayout.of(LLAMA_70B, "int8", dynamic_scales=False).bytes_per_token == 163_840


def test_sixteen_bits_have_no_scales_to_be_dynamic():
    assert KVCacheLayout.of(LLAMA_70B, "bf16", dynamic_scales=True).scale_bytes_per_token == 0


def test_eight_ranks_hold_an_eighth():
    rank = KVCacheLayout.of(LLAMA_70B, "bf16", tensor_parallel=8)
    assert rank.groups[0].spec.num_kv_heads == 1
    assert rank.needed_bytes(256_000) < 10 * GiB
    assert rank.bytes_per_token * 8 == 327_680


def test_more_ranks_than_kv_heads_hold_each_head_several_times():
    assert KVCacheLayout.of(LLAMA_70B, "bf16", tensor_parallel=16).bytes_per_token == 40_960


def test_without_gqa_eight_times_as_much():
    assert KVCacheLayout.of(architecture(80, 64, 64, 128), "bf16").needed_bytes(256_000) > 600 * GiB
    assert KVCacheLayout.of(architecture(80, 64, 64, 128), "bf16").bytes_per_token == 8 * 327_680


def test_what_half_a_card_holds():
    layout = KVCacheLayout.of(LLAMA_70B, "fp8")
    blocks = layout.num_blocks(80 * GiB - 40 * GiB)
    assert blocks * layout.groups[0].block_tokens == 262_144
    assert layout.longest_sequence(blocks, 10**9) == 262_144


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (architecture(36, 32, 8, 128, hidden=2560), 147_456),
        (architecture(40, 32, 8, 128, hidden=5120), 163_840),
        (architecture(30, 9, 3, 64, hidden=576), 23_040),
    ],
)
def test_c27_head_dim_is_not_hidden_over_heads(model, expected):
    assert KVCacheLayout.of(model, "bf16").bytes_per_token == expected


def test_c27_smollm2_at_its_full_context():
    assert KVCacheLayout.of(architecture(30, 9, 3, 64, hidden=576), "bf16").needed_bytes(8192) == 180 * MiB


def test_a_rank_count_that_splits_no_head_is_refused_with_those_that_do():
    with pytest.raises(InputError, match="--tp 4 does not split 9 heads and 3 KV heads evenly; valid: 1, 3, 9"):
        KVCacheLayout.of(architecture(30, 9, 3, 64), "bf16", tensor_parallel=4)


# --- C28: 26 layers, 1 KV head, head_dim 256, window 512 on all but every sixth layer


def gemma(window: int = 512) -> ModelArchitecture:
    return ModelArchitecture.from_config(
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262_144,
            "sliding_window": window,
            "sliding_window_pattern": 6,
        }
    )


def test_c28_a_window_layer_needs_its_window_and_no_more():
    layout = KVCacheLayout.of(gemma(), "bf16")
    assert layout.needed_bytes(32_768) == 139 * MiB
    assert layout.bytes_per_token * 32_768 == 832 * MiB
    assert layout.needed_bytes(512) == 512 * layout.bytes_per_token


def test_c28_what_is_reserved_is_whole_blocks_of_equal_bytes():
    layout = KVCacheLayout.of(gemma(), "bf16")
    window, full = sorted(layout.groups, key=lambda group: group.spec.window is None)
    assert len(window.layers) == 22
    assert len(full.layers) == 4
    assert window.block_bytes == full.block_bytes == layout.block_bytes
    assert window.block_tokens == 16
    # Steps of 512 tokens read 511 before their own: 1,023 tokens, from anywhere in a block.
    assert window.blocks_for(32_768, step_tokens=512) == 65
    assert full.blocks_for(32_768) == -(-32_768 // full.block_tokens)
    reserved = layout.reserved_bytes(32_768, step_tokens=512)
    assert reserved == layout.block_bytes * (65 + full.blocks_for(32_768))
    assert layout.needed_bytes(32_768) < reserved < 832 * MiB


def test_the_longest_sequence_is_the_longest():
    layout = KVCacheLayout.of(gemma(), "bf16")
    for blocks in (0, 1, 2, 3, 10, 66, 100, 1000):
        longest = layout.longest_sequence(blocks, 10**6, step_tokens=64)
        assert layout.blocks_for(longest, 64) <= blocks
        assert layout.blocks_for(longest + 1, 64) > blocks


@pytest.mark.parametrize("block_tokens", [1, 8, 16, 32, 48])
def test_every_group_has_at_least_the_tokens_asked_for(block_tokens):
    for model in (gemma(), LLAMA_70B):
        layout = KVCacheLayout.of(model, "bf16", block_tokens=block_tokens)
        assert min(group.block_tokens for group in layout.groups) >= block_tokens
    assert KVCacheLayout.of(LLAMA_70B, "bf16", block_tokens=block_tokens).groups[0].block_tokens == block_tokens


def test_blocks_of_unequal_bytes_are_no_layout():
    layout = KVCacheLayout.of(gemma(), "bf16")
    first, second = layout.groups
    from dataclasses import replace

    with pytest.raises(ValueError, match="equal in bytes"):
        KVCacheLayout((first, replace(second, block_tokens=second.block_tokens + 1)))


def test_k_and_v_may_differ_in_width():
    from dataclasses import replace

    wide = replace(LLAMA_70B, attention=(AttentionLayer(8, 192, 128),) * 80)
    assert KVCacheLayout.of(wide, "bf16").bytes_per_token == 80 * 8 * (192 + 128) * 2
