"""Decoders that llmq has no data for, by transformers' own code over our paged attention."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model
from transformers_oracle import check_against_transformers

from llmq.profiles.errors import InputError

CASES = [
    ("cohere", {"logit_scale": 0.25}),  # parallel residual, interleaved rotation, logits scaled
    ("glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    ("helium", {"head_dim": 16}),
    ("olmo", {}),  # norms without weights
    ("phi", {"partial_rotary_factor": 0.5}),
    ("cohere2", {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}),
    ("olmo3", {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}),
    ("gemma", {"head_dim": 16}),
]


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_logits_and_tokens_equal_transformers(tmp_path, make_engine, model_type, changes):
    check_against_transformers(save_tiny_model(tmp_path, model_type, **changes), make_engine)


def test_the_fingerprint_says_whose_code_runs(tmp_path, make_engine):
    engine = make_engine(save_tiny_model(tmp_path, "helium", head_dim=16))
    assert engine.info.fingerprint["model_code"].startswith("transformers 5.")
    assert engine.info.fingerprint["model_code"].endswith(", HeliumForCausalLM")
    assert engine.info.fingerprint["weights"] == "15 × float32"
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert stored <= engine.info.weight_bytes < stored + 1000  # the rotation's frequencies


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("stablelm", {}, "StableLmForCausalLM.* calls its own attention"),
        ("gpt_oss", {"num_local_experts": 4, "sliding_window": 24, "head_dim": 16}, "its attention takes s_aux"),
        (
            "helium",
            {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic'",
        ),
    ],
)
def test_what_cannot_run_there_is_refused_by_name(tmp_path, make_engine, model_type, changes, reason):
    with pytest.raises(InputError, match=reason):
        make_engine(save_tiny_model(tmp_path, model_type, **changes))


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "x"}},
            "quantized checkpoints do not",
        ),
        ({"num_hidden_layers": 3}, "missing keys"),
        ({"num_hidden_layers": 1}, "unexpected keys"),
        ({"sliding_window": 24}, "the KV-cache would not be the one that was planned"),
        ({"model_type": "no_such_model"}, "neither the runtime nor transformers"),
    ],
)
def test_a_config_that_is_not_what_the_code_does_is_refused(tmp_path, make_engine, changes, reason):
    change_config(save_tiny_model(tmp_path, "helium", head_dim=16), **changes)
    with pytest.raises(Exception, match=reason) as caught:
        make_engine(tmp_path)
    assert caught.value.exit_code == 2


def test_code_that_mixes_the_tokens_of_a_batch_is_refused(tmp_path, make_engine, monkeypatch):
    from transformers.models.helium.modeling_helium import HeliumMLP

    original = HeliumMLP.forward
    monkeypatch.setattr(HeliumMLP, "forward", lambda self, x: original(self, x + x.roll(1, dims=1)))
    with pytest.raises(InputError, match="sequences of one batch see each other"):
        make_engine(save_tiny_model(tmp_path, "helium", head_dim=16))


def test_where_transformers_is_not_installed(tmp_path, make_engine, monkeypatch):
    monkeypatch.setattr("llmq.runtime.models.loader.find_spec", lambda name: None)
    with pytest.raises(InputError, match="'helium' runs by transformers' own code, which is not installed here"):
        make_engine(save_tiny_model(tmp_path, "helium", head_dim=16))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path, make_engine):
    file = save_tiny_model(tmp_path, "helium", head_dim=16) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight_of_another"] = torch.zeros(1)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"missing keys for HeliumForCausalLM: model\.layers\.1\.mlp\.up_proj"):
        make_engine(tmp_path)
