"""What a decoder's checkpoint must hold, against what transformers saves of every family."""

import json
from dataclasses import replace

import pytest
from family_cases import CASES
from tiny_model import save_tiny_model

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.decoder_tensors import check_tensors, decoder_tensors
from llmq.profiles.errors import InputError
from llmq.profiles.safetensors_file import TensorInfo


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_what_transformers_saves_is_what_is_expected(tmp_path, model_type, changes):
    checkpoint = read_checkpoint(save_tiny_model(tmp_path, model_type, **changes))
    expected = decoder_tensors(checkpoint.architecture, checkpoint.architecture.family, checkpoint.config)
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == expected
    check_tensors(checkpoint)


@pytest.fixture
def checkpoint(tiny_llama):
    return read_checkpoint(tiny_llama())


def with_tensors(checkpoint, **tensors):
    """The checkpoint with other tensors; None: without."""
    found = {**checkpoint.tensors, **{name.replace("__", "."): info for name, info in tensors.items()}}
    return replace(checkpoint, tensors={name: info for name, info in found.items() if info is not None})


def info(name, dtype, *shape):
    size = 4
    for side in shape:
        size *= side
    return TensorInfo(name, dtype, shape, size, "model.safetensors")


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({UP: None}, rf"has no tensor {UP}, which its config\.json calls for"),
        ({UP: None, NORM: None}, rf"has no tensor {NORM} \(2 such tensors\)"),
        ({"model.embed_tokens.weight": None}, r"no tensor model\.embed_tokens\.weight"),
        ({UP: info(UP, "F32", 96, 64)}, r"up_proj\.weight is \[96, 64\], config\.json makes it \[128, 64\]"),
        ({NORM: info(NORM, "F32", 64, 1)}, r"input_layernorm\.weight is \[64, 1\], config\.json makes it \[64\]"),
        ({UP: info(UP, "I8", 128, 64)}, r"up_proj\.weight is stored as I8"),
        ({"model.layers.2.mlp.up_proj.weight": info("x", "F32", 128, 64)}, r"holds model\.layers\.2\.mlp\.up_proj"),
        ({"model.layers.0.self_attn.q_proj.bias": info("x", "F32", 64)}, r"'llama' does not use"),
    ],
)
def test_what_the_config_does_not_call_for_is_named(checkpoint, tensors, words):
    with pytest.raises(InputError, match=words):
        check_tensors(with_tensors(checkpoint, **tensors))


def test_a_tied_heads_copy_and_buffers_are_no_harm(checkpoint):
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    check_tensors(
        with_tensors(
            checkpoint, **{"lm_head.weight": info("lm_head.weight", "F32", 512, 64), rotary: info(rotary, "F32", 8)}
        )
    )


@pytest.mark.parametrize(
    ("layers", "words"), [(1, "holds tensors of layer 1, and config"), (3, "holds no tensor of layer 2, and config")]
)
def test_of_a_family_that_is_not_known_the_layers_are_counted(checkpoint, tmp_path, layers, words):
    config = {**checkpoint.config, "model_type": "strange", "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        check_tensors(replace(checkpoint, config=config))
