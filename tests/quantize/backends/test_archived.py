"""The whole way of an archived library, with a stub in its place: files there, files back, our folder, our report."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import FailedError
from llmq.profiles.progress import silent
from llmq.quantize.backends import archived, registry
from llmq.quantize.backends.libraries import AUTOAWQ, ArchivedLibrary
from llmq.quantize.calibration import load_calibration, load_tokenizer
from llmq.quantize.preflight import preflight
from llmq.quantize.recipe import Recipe
from llmq.quantize.report import REPORT_FILE


class StubEnvironment:
    exists = True
    requirements = "# what it was tried with\nautoawq==0.2.9\ntorch==2.13.0\n"

    def python(self, progress):
        return Path(sys.executable)


class Stub(ArchivedLibrary):
    environment = StubEnvironment()
    script = Path(__file__).with_name("stub_job.py")


def stub(**settings):
    fields = {name: getattr(AUTOAWQ, name) for name in AUTOAWQ.__dataclass_fields__}
    return Stub(**{**fields, "settings": {"doing": "work", **settings}})


@pytest.fixture
def source(tiny_llama):
    return tiny_llama(dtype="bfloat16", head_dim=32)


@pytest.fixture
def run(source, calibration_jsonl, tmp_path):
    """run(**settings of the stub) -> what `layers` yields."""

    def go(checkpoint=None, progress=silent, device="cpu", **settings):
        library = stub(**settings)
        checkpoint = checkpoint or read_checkpoint(source)
        plan = preflight(checkpoint, Recipe.of("awq", group_size=32), tmp_path / "out")
        calibration = load_calibration(str(calibration_jsonl), load_tokenizer(source), num_samples=6, seq_len=40)
        return list(archived.layers(library, plan, calibration, torch.device(device), progress))

    return go


def test_each_layer_comes_back_as_it_was_written(run, source, tmp_path):
    seen = []
    results = run(progress=lambda *step, unit="": seen.append(step), keep=str(tmp_path / "kept"))
    assert len(results) == 2
    assert [sorted(name.split(".")[2] for name in result.linears)[0] for result in results] == ["0", "1"]
    original, stored = load_file(source / "model.safetensors"), load_file(tmp_path / "kept.safetensors")
    for index, result in enumerate(results):
        assert len(result.linears) == len(result.reports) == 7
        for name, weight in result.linears.items():
            scaled = index == 1 and "self_attn" in name and "o_proj" not in name
            expected = original[f"{name}.weight"].float() / (2 if scaled else 1)
            step = weight.scale.float().repeat_interleave(32, dim=1)
            assert ((weight.dequantize() - expected).abs() <= 0.51 * step).all()
            assert torch.equal(weight.scale, stored[f"{name}.scales"].T)
    assert set(results[0].changed) == set()
    assert set(results[1].changed) == {"model.layers.1.input_layernorm.weight"}
    norm = results[1].changed["model.layers.1.input_layernorm.weight"]
    assert norm.dtype == torch.bfloat16
    assert torch.equal(norm, original["model.layers.1.input_layernorm.weight"] * 2)
    assert results[1].reports[0].output_error == 0.02
    assert results[1].scalings[0].source == "model.layers.1.input_layernorm"
    assert results[0].scalings == []
    assert seen[-1] == ("quantizing", 2, 2)
    assert not list(tmp_path.glob(".out*"))


def test_the_folder_holds_the_library_s_bytes_and_all_that_serving_needs(
    source, calibration_jsonl, run_quantize, tmp_path, monkeypatch
):
    backend = registry.Archived(stub(keep=str(tmp_path / "kept")), "awq")
    monkeypatch.setitem(registry.BACKENDS, "autoawq", backend)
    out = tmp_path / "out"
    report = run_quantize(source, out, "awq", calibration_jsonl, group_size=32, backend="autoawq")
    stored, theirs = load_file(out / "model.safetensors"), load_file(tmp_path / "kept.safetensors")
    assert stored.keys() == theirs.keys()
    for name, tensor in theirs.items():
        expected = tensor if name.endswith(("qweight", "qzeros", "scales")) else tensor.to(torch.bfloat16)
        assert torch.equal(stored[name], expected), name
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
    assert config["quantization_config"]["group_size"] == 32
    names = {path.name for path in out.iterdir()}
    assert {path.name for path in source.iterdir()} <= names  # the tokenizer, the chat template, the generation config
    assert json.loads((out / REPORT_FILE).read_text())["settings"] == report.settings
    assert report.settings["backend"] == "AutoAWQ 0.2.9"
    assert report.settings["versions"] == {"autoawq": "0.2.9", "torch": "2.13.0"}
    assert report.mean_output_error() is None  # the library measures nothing of plain rounding
    assert not list(tmp_path.glob(".out*"))


def test_a_stopped_library_leaves_no_folder(source, calibration_jsonl, run_quantize, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.BACKENDS, "autoawq", registry.Archived(stub(doing="fail"), "awq"))
    with pytest.raises(FailedError, match="a zero dimension"):
        run_quantize(source, tmp_path / "out", "awq", calibration_jsonl, group_size=32, backend="autoawq")
    assert not (tmp_path / "out").exists()


def test_what_the_library_is_told(run, source, tmp_path):
    run(keep=str(tmp_path / "kept"))
    told = json.loads((tmp_path / "kept").read_text())
    assert (told["bits"], told["group_size"], told["symmetric"], told["dtype"]) == (4, 32, False, "float32")
    assert len(told["samples"]) == 6
    assert told["seq_len"] == max(map(len, told["samples"])) <= 40
    assert told["left_out"] == []
    assert told["cuda"] == ""  # on a machine with a GPU too, where --device cpu is asked for


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_type": "default"}, 5e5, None),
        ({"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}, 1e6, {"type": "linear", "factor": 2.0}),
        (
            {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            5e5,
            {"type": "llama3", "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        ),
    ],
    ids=["default", "linear", "llama3"],
)
def test_an_old_transformers_reads_rope_and_dtype_in_its_own_words(source, tmp_path, rope, theta, scaling):
    checkpoint = read_checkpoint(source)
    checkpoint = replace(checkpoint, config={**checkpoint.config, "rope_parameters": rope})
    archived._lay_out_source(checkpoint, tmp_path / "laid")
    config = json.loads((tmp_path / "laid" / "config.json").read_text())
    assert config["rope_theta"] == theta
    assert config["rope_scaling"] == scaling
    assert config["torch_dtype"] == "bfloat16"
    assert not {"rope_parameters", "dtype"} & config.keys()
    assert (tmp_path / "laid" / "model.safetensors").resolve() == (source / "model.safetensors").resolve()


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        ("fail", "AutoAWQ 0.2.9 stopped: AssertionError: a zero dimension; --awq without --backend may do"),
        ("die", "stopped: killed by signal 9"),
        ("forget", "did not quantize model.layers.1.mlp.down_proj"),
    ],
)
def test_its_failures_are_told_and_nothing_is_left(run, tmp_path, doing, words):
    with pytest.raises(FailedError, match=words):
        run(doing=doing)
    assert not list(tmp_path.glob(".out*"))
    assert not (tmp_path / "out").exists()


def test_an_interruption_ends_the_library(run, tmp_path):
    def interrupt(stage, done, total, unit=""):
        if total == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(progress=interrupt)
    assert not list(tmp_path.glob(".out*"))
