"""What the archived libraries cannot do is refused before anything is made, and points to ours."""

import time
from dataclasses import replace

import pytest

from llmq.profiles import machine
from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import FailedError, InputError
from llmq.quantize.backends.libraries import AUTOAWQ, AUTOGPTQ
from llmq.quantize.backends.registry import BACKENDS, backend_named
from llmq.quantize.preflight import preflight
from llmq.quantize.recipe import Recipe

# Heads of 32, so that k and v have 64 outputs; a head of its own, for AutoAWQ ties nothing.
DENSE = {"dtype": "bfloat16", "head_dim": 32}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def plan_of(tiny_llama, tmp_path):
    def make(method="awq", *, model=None, **recipe):
        source = read_checkpoint(tiny_llama(**{**DENSE, **(model or {})}))
        return preflight(source, Recipe.of(method, **recipe), tmp_path / "out")

    return make


def refuse(library, plan, error=InputError, device="auto"):
    started = time.monotonic()
    with pytest.raises(error) as raised:
        library.check(plan, device)
    assert time.monotonic() - started < 1
    return str(raised.value)


def test_what_can_be_done_is_not_refused(plan_of, tmp_path):
    AUTOAWQ.check(plan_of(group_size=32), "cpu")
    assert not (tmp_path / "cache").exists()


def test_autogptq_wants_cuda_and_we_say_so(plan_of, monkeypatch):
    monkeypatch.setattr(machine, "gpus", list)
    message = refuse(AUTOGPTQ, plan_of("gptq", symmetric=True), FailedError)
    assert "AutoGPTQ 0.7.1 quantizes on a CUDA device only, and this machine has none" in message
    assert "--gptq without --backend computes the same method here" in message
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("H200", 1, 1)])
    assert "--device cpu was asked for" in refuse(AUTOGPTQ, plan_of("gptq", symmetric=True), FailedError, device="cpu")
    AUTOGPTQ.check(plan_of("gptq", symmetric=True, group_size=32, ignore=("o_proj",)), "auto")
    assert "is read in two ways (--sym)" in refuse(AUTOGPTQ, plan_of("gptq", group_size=32))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"symmetric": True}, "symmetric weights, and its layout has zero points always (--asym)"),
        ({"group_size": "channel"}, "one group a row, and its kernels take 16, 32, 64, 128"),
        ({"ignore": ("o_proj",)}, "it quantizes every linear of a layer, and model.layers.0.self_attn.o_proj"),
        ({"model": {"model_type": "qwen3", "head_dim": 16}}, "k_proj has 32 outputs, and it needs a multiple of 64"),
        ({"model": {"model_type": "olmo2"}}, "model_type 'olmo2' is not among those it is run on (lla"),
    ],
    ids=["symmetric", "channel", "ignore", "narrow", "unknown"],
)
def test_autoawq_says_what_it_cannot(plan_of, changes, words):
    message = refuse(AUTOAWQ, plan_of(**{"group_size": 32, **changes}))
    assert message.startswith("--backend autoawq: ")
    assert words in message
    assert message.endswith("; --awq without --backend does that")


def test_a_linear_left_out_of_one_layer_only(plan_of, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("H200", 1, 1)])
    message = refuse(AUTOGPTQ, plan_of("gptq", symmetric=True, group_size=32, ignore=("layers.0.mlp.down_proj",)))
    assert "mlp.down_proj is left out of some layers only" in message


def test_a_rope_that_the_old_transformers_does_not_compute(plan_of, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("H200", 1, 1)])
    plan = plan_of("gptq", symmetric=True, group_size=32)
    config = {**plan.source.config, "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}
    plan = replace(plan, source=replace(plan.source, config=config))
    assert "its transformers computes no RoPE of type 'llama3'" in refuse(AUTOGPTQ, plan)
    AUTOAWQ.check(replace(plan_of(group_size=32), source=plan.source), "cpu")


def test_requirements_are_pinned_and_make_a_folder_of_their_own():
    for library in (AUTOAWQ, AUTOGPTQ):
        lines = [line for line in library.environment.requirements.splitlines() if not line.startswith("#")]
        assert all(line.count("==") == 1 for line in lines)
    assert AUTOAWQ.environment.folder != AUTOGPTQ.environment.folder


def test_backends_have_names_methods_and_formats():
    assert {name: (b.methods[0], b.default_format) for name, b in BACKENDS.items()} == {
        "llmcompressor": ("gptq", "compressed-tensors"),
        "autoawq": ("awq", "awq"),
        "autogptq": ("gptq", "gptq"),
    }
    with pytest.raises(InputError, match=r"--backend autoround: llmq .*, llmcompressor, autoawq, autogptq"):
        backend_named("autoround")
    settings = backend_named("autoawq").settings("awq")
    assert settings["backend"] == "AutoAWQ 0.2.9"
    assert settings["versions"]["transformers"] == "4.51.3"
