import pytest
import torch
from tiny_model import save_tiny_model

from llmq.evals.weight_damage import WeightDamage
from llmq.profiles.errors import InputError
from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine

TEXT = [(7 * i * i + 3 * i) % 500 for i in range(96)]
NAMES = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def open_engine(folder, **changes):
    options = {"max_model_len": 64, "max_num_seqs": 1, "enable_prefix_caching": False, "dtype": "fp32"} | changes
    return Engine.from_config(EngineConfig(model=str(folder), kv_cache_memory_bytes=1 << 20, **options))


def log_probs(model, windows):
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for ids in windows])


def test_damage_is_the_divergence_that_transformers_computes_and_leaves_no_trace(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    damage = WeightDamage(open_engine(folder), TEXT, window=32, num_windows=2)
    windows = [TEXT[:32], TEXT[32:64]]
    before = log_probs(model, windows)
    changed = {}
    for name in NAMES:
        weight = model.get_submodule(name).weight
        changed[name] = weight.detach() + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        weight.data.copy_(changed[name])
    after = log_probs(model, windows)
    expected = float((before.exp() * (before - after)).sum(-1).mean())

    assert damage.num_tokens == 62
    assert damage(changed) == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-3
    assert damage({}) == 0.0


def test_a_prefix_cache_would_remember_other_weights(folder):
    with (
        pytest.raises(InputError, match="without a prefix cache"),
        open_engine(folder, enable_prefix_caching=True).replaced_weights({}),
    ):
        pass


def test_weights_that_cannot_be_replaced_are_named(folder):
    with pytest.raises(InputError, match=r"layers\.7\.mlp\.up_proj is no linear"):
        WeightDamage(open_engine(folder), TEXT, window=32, num_windows=1)(
            {"model.layers.7.mlp.up_proj": torch.zeros(1)}
        )


def test_a_text_shorter_than_a_window_is_refused(folder):
    with pytest.raises(InputError, match="20 tokens of text, 32 are needed"):
        WeightDamage(open_engine(folder), TEXT[:20], window=32, num_windows=1)
