"""Whole quantizations of tiny models: what is on disk, what plain transformers makes of it, what the report says."""

import json
import os
import re
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmq.profiles.errors import FailedError, InputError
from llmq.quantize.calibration import load_calibration, load_tokenizer
from llmq.quantize.formats.compressed_tensors import QuantizationConfig
from llmq.quantize.formats.legal import FORMATS, legal_row
from llmq.quantize.formats.registry import format_of
from llmq.quantize.formats.scheme import FormatError
from llmq.quantize.recipe import KV_SCHEMES, LinearSettings, MethodOptions, Rule
from llmq.quantize.report import REPORT_FILE
from llmq.quantize.report_html import REPORT_PAGE
from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine

METHODS = ["awq", "gptq", "smoothquant", "fp8", "rtn"]


@pytest.fixture(scope="module")
def source(tiny_llama):
    return tiny_llama(dtype="bfloat16")


@pytest.fixture(scope="module")
def quantized(source, calibration_jsonl, run_quantize, tmp_path_factory):
    """quantized(method) -> folder and report, made once."""
    made = {}

    def make(method):
        if method not in made:
            out = tmp_path_factory.mktemp("quantized") / method
            made[method] = out, run_quantize(source, out, method, calibration_jsonl)
        return made[method]

    return make


def copy_of(folder, target):
    target.mkdir()
    for name in os.listdir(folder):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def read_all(folder):
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    return tensors, config, QuantizationConfig.from_config(config["quantization_config"])


def transformers_model(folder, dtype=torch.bfloat16):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def linears_of(tensors):
    return sorted({name.rsplit(".", 1)[0] for name in tensors if name.endswith("weight_scale")})


@pytest.mark.parametrize("method", METHODS)
def test_plain_transformers_loads_the_weights_that_we_read(quantized, method):
    folder, _ = quantized(method)
    tensors, _, config = read_all(folder)
    model = transformers_model(folder)
    ids = torch.arange(3, 35).unsqueeze(0)
    with torch.no_grad():
        theirs = model(ids).logits
    assert torch.isfinite(theirs).all()
    for name in linears_of(tensors):
        ours = config.read(name, tensors.__getitem__).dequantize(torch.bfloat16)
        assert torch.equal(model.get_submodule(name).weight, ours)


@pytest.mark.parametrize("method", ["awq", "gptq", "rtn"])
def test_weight_only_logits_equal_those_of_our_dequantized_weights(quantized, source, method):
    folder, _ = quantized(method)
    tensors, _, config = read_all(folder)
    dense = transformers_model(source)
    state = {name: tensor for name, tensor in tensors.items() if name.rsplit(".", 1)[0] not in linears_of(tensors)}
    for name in linears_of(tensors):
        state[f"{name}.weight"] = config.read(name, tensors.__getitem__).dequantize(torch.bfloat16)
    missing, unexpected = dense.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    ids = torch.arange(3, 35).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(dense(ids).logits, transformers_model(folder)(ids).logits)


@pytest.mark.parametrize("method", METHODS)
def test_the_tied_head_is_stored_once_and_not_quantized(quantized, source, method):
    folder, report = quantized(method)
    tensors, config, _ = read_all(folder)
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors
    assert torch.equal(
        tensors["model.embed_tokens.weight"], load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    )
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert "tied" in report.left_alone["lm_head"]
    model = transformers_model(folder)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("method", METHODS)
def test_sizes_are_as_predicted_and_dtypes_as_declared(quantized, method):
    folder, report = quantized(method)
    tensors, _, _ = read_all(folder)
    assert report.bytes_after == report.predicted_bytes == sum(tensor.nbytes for tensor in tensors.values())
    left = [name for name in tensors if name.rsplit(".", 1)[0] not in linears_of(tensors)]
    assert left
    assert {tensors[name].dtype for name in left} == {torch.bfloat16}
    assert all(tensors[f"{name}.weight_scale"].dtype == torch.bfloat16 for name in linears_of(tensors))


def test_everything_beside_the_weights_comes_along(quantized, source):
    folder, _ = quantized("awq")
    expected = {name for name in os.listdir(source) if name != "model.safetensors"}
    assert set(os.listdir(folder)) == expected | {"model.safetensors", REPORT_FILE, REPORT_PAGE}
    for name in expected - {"config.json"}:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("method", METHODS)
def test_the_report_tells_what_was_done_to_every_linear(quantized, method):
    folder, report = quantized(method)
    stored = json.loads((folder / REPORT_FILE).read_text())
    assert stored == json.loads(json.dumps(report.as_dict()))
    assert len(stored["linears"]) == 14
    for entry in stored["linears"]:
        assert entry["scheme"] == report.scheme
        assert entry["bytes_after"] < entry["bytes_before"]
        assert 0 < entry["weight_error"] < 0.2
    bits = 4 if method in ("awq", "gptq", "rtn") else 8
    assert bits < stored["bits_per_quantized_weight"] < bits + 0.6
    assert (stored["calibration"] is None) == (method in ("fp8", "rtn"))
    assert stored["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_dead_input_channels_are_reported_and_harm_nobody(
    tiny_llama, calibration_jsonl, run_quantize, tmp_path, method
):
    """C02: an input channel that is always zero; the logits are those of a source whose dead column is zero too."""
    folder = copy_of(tiny_llama(dtype="bfloat16"), tmp_path / "dead")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 5] = 0
    for name in tensors:
        if "layernorm" in name:
            tensors[name][5] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = run_quantize(folder, tmp_path / "out", method, calibration_jsonl, group_size="32")
    dead = {entry.name.rsplit(".", 1)[1]: entry.dead_inputs for entry in report.linears}
    assert dead == {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 0, "gate_proj": 1, "up_proj": 1, "down_proj": 0}
    ids = torch.arange(3, 35).unsqueeze(0)
    quantized_model = transformers_model(tmp_path / "out")
    with torch.no_grad():
        logits = quantized_model(ids).logits
        for layer in quantized_model.model.layers:
            for linear in (layer.self_attn.q_proj, layer.mlp.gate_proj):
                linear.weight[:, 5] = 0
        assert torch.isfinite(logits).all()
        assert torch.equal(quantized_model(ids).logits, logits)


def test_awq_reports_its_choices_and_beats_rounding_in_every_mean(quantized):
    _, report = quantized("awq")
    ours, rtn = report.mean_output_error()
    assert ours < rtn * 0.9
    assert len(report.scalings) == 8
    assert all(0 <= scaling.error <= scaling.unscaled_error for scaling in report.scalings)
    assert all(entry.num_tokens == report.calibration["num_tokens"] for entry in report.linears)
    assert report.group_size["value"] == 64
    assert "auto" in report.group_size["reason"]


def test_smoothquant_searches_an_alpha_for_each_input(quantized, source):
    folder, report = quantized("smoothquant")
    tensors, original = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    assert torch.equal(tensors["model.norm.weight"], original["model.norm.weight"])
    assert len(report.scalings) == 8
    for scaling in report.scalings:
        assert scaling.skipped is None
        assert scaling.error <= scaling.unscaled_error
        norm = f"{scaling.source}.weight"
        if "norm" in norm:
            assert torch.equal(tensors[norm], original[norm]) == (scaling.alpha is None)
    assert any(scaling.alpha is not None for scaling in report.scalings)


def test_a_given_alpha_is_every_mappings(source, run_quantize, calibration_jsonl, tmp_path):
    report = run_quantize(source, tmp_path / "out", "smoothquant", calibration_jsonl, options=MethodOptions(alpha=0.35))
    assert {scaling.alpha for scaling in report.scalings} <= {0.35, None}
    assert report.settings["smoothquant"]["alpha"] == 0.35


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_a_norm_that_feeds_linears_left_alone_takes_no_scale(source, calibration_jsonl, run_quantize, tmp_path, method):
    left = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    report = run_quantize(source, tmp_path / "out", method, calibration_jsonl, ignore=left)
    tensors, original = load_file(tmp_path / "out/model.safetensors"), load_file(source / "model.safetensors")
    for name, tensor in original.items():
        if "norm" in name or any(kind in name for kind in left[:3]):
            assert torch.equal(tensors[name], tensor)
    assert all("q_proj" in s.skipped for s in report.scalings if s.source.endswith("input_layernorm"))


@pytest.mark.parametrize("method", ["awq", "gptq", "smoothquant"])
def test_an_ignored_layer_keeps_its_bytes(source, calibration_jsonl, run_quantize, tmp_path, method):
    out = tmp_path / "out"
    report = run_quantize(source, out, method, calibration_jsonl, ignore=(r"re:.*layers\.0\..*",))
    tensors, config, quantization = read_all(out)
    original = load_file(source / "model.safetensors")
    kept = [name for name in original if "layers.0." in name]
    assert len(kept) == 9
    for name in kept:
        assert torch.equal(tensors[name], original[name])
    ignored = config["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.down_proj" in ignored
    assert len(ignored) == 8
    assert quantization.scheme_for("model.layers.0.mlp.down_proj") is None
    assert quantization.scheme_for("model.layers.1.mlp.down_proj") is not None
    assert report.left_alone["model.layers.0.mlp.down_proj"] == r"--ignore re:.*layers\.0\..*"
    model = transformers_model(out)
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, original["model.layers.0.mlp.down_proj.weight"])
    assert linears_of(tensors) == sorted(f"model.layers.1.{name}" for name in LINEARS)


LINEARS = [*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))]


def test_zero_groups_and_huge_columns_in_half_precision(tiny_llama, calibration_jsonl, run_quantize, tmp_path):
    """C04: nothing aborts, every scale is finite and positive as stored, the report shows the layer."""
    folder = copy_of(tiny_llama(dtype="float16"), tmp_path / "odd")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"][3, :32] = 0
    tensors["model.layers.0.mlp.up_proj.weight"][:, 7] *= 6e4 / 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    report = run_quantize(folder, out, "awq", calibration_jsonl, group_size="32")
    stored, _, config = read_all(out)
    for name in linears_of(stored):
        scale = stored[f"{name}.weight_scale"]
        assert scale.dtype == torch.float16
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()
        assert torch.isfinite(config.read(name, stored.__getitem__).dequantize()).all()
    assert any(s.source.endswith("layers.0.post_attention_layernorm") for s in report.scalings)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "mistral"])
def test_awq_of_the_other_families_loads_in_transformers(
    tiny_llama, calibration_jsonl, run_quantize, tmp_path, model_type
):
    folder = tiny_llama(model_type=model_type, dtype="bfloat16", tie_word_embeddings=False)
    run_quantize(folder, tmp_path / "out", "awq", calibration_jsonl)
    ids = torch.arange(3, 35).unsqueeze(0)
    with torch.no_grad():
        ours, original = transformers_model(tmp_path / "out")(ids).logits, transformers_model(folder)(ids).logits
    assert (ours - original).float().norm() < 0.8 * original.float().norm()
    assert torch.equal(
        load_file(tmp_path / "out/model.safetensors")["lm_head.weight"],
        load_file(folder / "model.safetensors")["lm_head.weight"],
    )


def test_a_head_that_is_tied_and_stored_all_the_same_is_stored_once(tiny_llama, run_quantize, tmp_path):
    folder = copy_of(tiny_llama(dtype="bfloat16"), tmp_path / "twice")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = run_quantize(folder, tmp_path / "out", "rtn")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert report.bytes_after == report.predicted_bytes


def test_float32_tensors_are_cast_to_the_declared_dtype(tiny_llama, run_quantize, tmp_path):
    folder = copy_of(tiny_llama(dtype="bfloat16"), tmp_path / "wide")
    wide = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    report = run_quantize(folder, tmp_path / "out", "rtn")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert report.bytes_after == report.predicted_bytes


def test_too_few_tokens_are_said_aloud(source, run_quantize, tmp_path):
    calib = tmp_path / "one.jsonl"
    calib.write_text('{"text": "Hi"}')
    report = run_quantize(source, tmp_path / "out", "awq", calib)
    assert any("rank < in_features" in warning for warning in report.warnings)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_run_leaves_nothing(source, calibration_jsonl, run_quantize, tmp_path, monkeypatch, error):
    from llmq.quantize import awq_layer

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(awq_layer, "search_clip", fail)
    with pytest.raises(error):
        run_quantize(source, tmp_path / "out", "awq", calibration_jsonl)
    assert os.listdir(tmp_path) == []


def test_a_number_that_is_not_finite_is_found_at_the_end(source, run_quantize, tmp_path, monkeypatch):
    from llmq.quantize import layer_methods

    good = layer_methods.quantize_weight

    def spoil(*args, **kwargs):
        weight = good(*args, **kwargs)
        weight.scale[0, 0] = float("inf")
        return weight

    monkeypatch.setattr(layer_methods, "quantize_weight", spoil)
    with pytest.raises(FailedError, match="not finite"):
        run_quantize(source, tmp_path / "out", "rtn")
    assert os.listdir(tmp_path) == []


def test_the_same_run_gives_the_same_bytes(quantized, source, calibration_jsonl, run_quantize, tmp_path):
    folder, _ = quantized("awq")
    run_quantize(source, tmp_path / "again", "awq", calibration_jsonl)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("format_name", "recipe"),
    [
        ("gptq", {"symmetric": True, "group_size": "32"}),
        ("gptq_v2", {"bits": 3, "group_size": "32"}),
        ("gptq", {"bits": 8, "symmetric": True, "group_size": "channel"}),
        ("awq", {"group_size": "32"}),
    ],
)
def test_other_layouts_hold_the_same_weights(source, run_quantize, tmp_path, format_name, recipe):
    """Written in another layout and read by its reader, each linear is what compressed-tensors holds of it."""
    run_quantize(source, tmp_path / "ct", "rtn", **recipe)
    report = run_quantize(source, tmp_path / "other", "rtn", format=format_name, **recipe)
    assert report.bytes_after == report.predicted_bytes
    expected, _, config = read_all(tmp_path / "ct")
    stored = load_file(tmp_path / "other/model.safetensors")
    quantization = json.loads((tmp_path / "other/config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == format_name.removesuffix("_v2")
    layout = format_of(quantization, stored)
    of_linears = {entry.name: entry.bytes_after for entry in report.linears}
    for name in linears_of(expected):
        assert of_linears[name] == sum(t.nbytes for key, t in stored.items() if key.rpartition(".")[0] == name)
        theirs = config.read(name, expected.__getitem__).dequantize()
        torch.testing.assert_close(layout.read(name, stored.__getitem__).dequantize(), theirs, rtol=2e-3, atol=1e-7)
    assert sorted(os.listdir(tmp_path)) == ["ct", "other"]


@pytest.mark.parametrize("format_name", FORMATS)
def test_all_that_is_legal_is_made_and_reads_back_and_all_else_is_refused(source, run_quantize, tmp_path, format_name):
    """Every bits, sign and extent that a method may be asked for. Reading back is the run's own last step."""
    choices = [
        {"bits": bits, "symmetric": symmetric, "group_size": size}
        for bits, symmetric, size in product((3, 4, 8), (True, False), ("32", "channel"))
    ]
    recipes = [("rtn", choice) for choice in choices] + [("fp8", {"fp8_scheme": name}) for name in ("dynamic", "block")]
    for number, (method, choice) in enumerate(recipes):
        scheme, out = LinearSettings.of(method, **choice).scheme, tmp_path / str(number)
        if legal_row(scheme, format_name) is None:
            with pytest.raises(FormatError, match=f"--format {format_name} does not store {re.escape(scheme.name)}"):
                run_quantize(source, out, method, format=format_name, **choice)
            continue
        report = run_quantize(source, out, method, format=format_name, **choice)
        assert report.scheme == scheme.name
        assert set(report.loaders) <= set(legal_row(scheme, format_name).loaders)
        assert report.loaders[0] == "llmq"
        assert report.bytes_after == report.predicted_bytes


def test_settings_of_single_linears_are_stored_and_read_back(source, run_quantize, calibration_jsonl, tmp_path):
    rules = (
        Rule(("mlp.down_proj",), LinearSettings.of("rtn", bits=8, group_size="channel", symmetric=True)),
        Rule(("layers.1.self_attn",), LinearSettings.of("rtn", bits=3, group_size="16")),
    )
    report = run_quantize(source, tmp_path / "out", "awq", calibration_jsonl, rules=rules)
    tensors, _, config = read_all(tmp_path / "out")
    names = {name.removeprefix("model.layers."): config.scheme_for(name).name for name in linears_of(tensors)}
    assert names["0.mlp.down_proj"] == names["1.mlp.down_proj"] == "int8 per channel symmetric"
    assert names["1.self_attn.o_proj"] == "int3 g16 asymmetric"
    assert names["0.self_attn.o_proj"] == names["1.mlp.up_proj"] == "int4 g64 asymmetric"
    methods = {entry.name.removeprefix("model.layers."): entry.method for entry in report.linears}
    assert (methods["0.mlp.down_proj"], methods["0.mlp.up_proj"]) == ("rtn", "awq")
    assert report.bytes_after == report.predicted_bytes
    skipped = {s.source.removeprefix("model.layers."): s.skipped for s in report.scalings}
    assert "down_proj is left" in skipped["0.mlp.up_proj"]
    assert torch.isfinite(transformers_model(tmp_path / "out")(torch.arange(3, 35).unsqueeze(0)).logits).all()


@pytest.mark.parametrize(("kv", "limit"), [("fp8", 448), ("int8", 127)])
def test_calibrated_kv_scales_are_the_largest_k_and_v(kv, limit, source, run_quantize, calibration_jsonl, tmp_path):
    """--kv: per tensor and static, K after its rotation, of the quantized model."""
    calibrated = run_quantize(source, tmp_path / "out", "rtn", calibration_jsonl, kv=kv)
    tensors, _, quantization = read_all(tmp_path / "out")
    assert quantization.kv_cache_scheme == KV_SCHEMES[kv]
    assert calibrated.calibration["num_samples"] == 16
    model = transformers_model(tmp_path / "out", torch.float32)
    samples = load_calibration(str(calibration_jsonl), load_tokenizer(source), num_samples=16, seq_len=48).samples
    largest = torch.zeros(2, 2)
    with torch.no_grad():
        for ids in samples:
            cache = model(torch.tensor([ids]), use_cache=True).past_key_values
            for layer in range(2):
                found = cache.layers[layer].keys.abs().max(), cache.layers[layer].values.abs().max()
                largest[layer] = torch.maximum(largest[layer], torch.stack(found))
    for layer in range(2):
        for place, kind in enumerate("kv"):
            scale = tensors[f"model.layers.{layer}.self_attn.{kind}_scale"]
            assert scale.shape == (1,)
            torch.testing.assert_close(scale.float()[0], largest[layer, place] / limit, rtol=0.02, atol=0)
    served = Engine.from_config(EngineConfig(model=str(tmp_path / "out"), kv_cache_memory_bytes=1 << 20, device="cpu"))
    assert served.info.fingerprint["kv_dtype"] == f"{kv}, static scales"


def test_one_short_text_is_enough_and_is_said_aloud(source, run_quantize, tmp_path):
    """C03: of three tokens the Hessian has no inverse; damping is raised step by step, or the linear rounded."""
    calib = tmp_path / "one.jsonl"
    calib.write_text('{"text": "abc"}')
    options = MethodOptions(damp=1e-4)
    report = run_quantize(source, tmp_path / "out", "gptq", calib, group_size="32", options=options)
    assert report.calibration["num_tokens"] == 3
    assert any(w.startswith("3 calibration tokens used") and "rank < in_features" in w for w in report.warnings)
    assert all(entry.num_tokens == 3 for entry in report.linears)
    raised = [entry for entry in report.linears if (entry.damping or 0) > 1e-4 * 1.001]
    assert bool(raised) == any("damping raised from 0.0001 to" in w for w in report.warnings)
    rounded = [entry for entry in report.linears if entry.damping is None]
    assert bool(rounded) == any("rounded to nearest" in w for w in report.warnings)
    assert torch.isfinite(transformers_model(tmp_path / "out")(torch.arange(3, 35).unsqueeze(0)).logits).all()


@pytest.mark.parametrize("method", ["smoothquant", "awq"])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}),
        ("gemma2", {"hidden_size": 96}),
        ("phi3", {}),
    ],
)
def test_smoothing_alone_changes_no_logit(
    tiny_llama, run_quantize, calibration_jsonl, tmp_path, method, model_type, changes
):
    """C31: --dry-quant writes float32, with every pair that was smoothed, or why not, in the report."""
    source = tiny_llama(model_type=model_type, dtype="bfloat16", **changes)
    options = MethodOptions(alpha=0.5 if method == "smoothquant" else None, smooth_only=True)
    report = run_quantize(source, tmp_path / "out", method, calibration_jsonl, options=options)
    assert report.linears == []
    assert report.bytes_after == report.predicted_bytes
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    moved = [scaling for scaling in report.scalings if scaling.skipped is None and scaling.alpha is not None]
    assert moved
    if model_type == "phi3":
        assert all(s.skipped for s in report.scalings if s.source.endswith("_proj"))
    else:
        assert any(scaling.source.endswith("v_proj") for scaling in moved)  # folded over the heads that share it
    original, smoothed = transformers_model(source, torch.float32), transformers_model(tmp_path / "out", torch.float32)
    name = f"{moved[0].linears[0]}.weight"
    assert not torch.equal(original.state_dict()[name], smoothed.state_dict()[name])
    with torch.no_grad():
        for start in range(5):
            ids = torch.arange(3 + 20 * start, 35 + 20 * start).unsqueeze(0)
            assert float((original(ids).logits - smoothed(ids).logits).abs().max()) < 1e-3


def test_static_fp8_stores_the_largest_input(source, run_quantize, calibration_jsonl, tmp_path):
    report = run_quantize(source, tmp_path / "out", "fp8", calibration_jsonl, fp8_scheme="static")
    tensors, _, config = read_all(tmp_path / "out")
    assert report.calibration is not None
    name = "model.layers.1.mlp.down_proj"
    assert config.read(name, tensors.__getitem__).input_scale > 0
    assert tensors[f"{name}.input_scale"].shape == (1,)
    assert report.scheme == "fp8 per tensor, activations fp8 static per tensor"
    assert torch.isfinite(transformers_model(tmp_path / "out")(torch.arange(3, 35).unsqueeze(0)).logits).all()


def test_fp8_blocks_go_into_the_layout_of_their_own(tiny_llama, run_quantize, tmp_path):
    source = tiny_llama(dtype="bfloat16", hidden_size=128, head_dim=32, intermediate_size=256)
    report = run_quantize(source, tmp_path / "out", "fp8", fp8_scheme="block", format="fp8")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (2, 1)
    assert report.bytes_after == report.predicted_bytes
    assert report.calibration is None


def test_a_source_in_several_files_gives_the_same_bytes(source, run_quantize, tmp_path):
    folder = copy_of(source, tmp_path / "shards")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    run_quantize(source, tmp_path / "one", "rtn")
    run_quantize(folder, tmp_path / "two", "rtn")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert "model.safetensors.index.json" not in os.listdir(tmp_path / "two")


def test_what_was_left_alone_is_compared_byte_by_byte(source, run_quantize, tmp_path, monkeypatch):
    from llmq.quantize import pipeline

    good = pipeline.as_stored
    monkeypatch.setattr(pipeline, "as_stored", lambda tensor, dtype: good(tensor, dtype) * 1.01)
    with pytest.raises(FailedError, match="was to be left alone, and is not what it is in"):
        run_quantize(source, tmp_path / "out", "rtn")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj", "layers.1.input_layernorm", "embed_tokens", "norm"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("method", METHODS)
def test_a_number_that_is_not_finite_is_named_before_its_layer_is_worked_on(
    source, run_quantize, calibration_jsonl, tmp_path, monkeypatch, name, value, method
):
    from llmq.quantize import layer_loop

    good, worked_on = layer_loop.quantize_layer, []
    monkeypatch.setattr(layer_loop, "quantize_layer", lambda *given: worked_on.append(1) or good(*given))
    name = f"model.{name}.weight"
    folder = copy_of(source, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[37] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"{re.escape(name)} holds 1 numbers that are not finite"):
        run_quantize(folder, tmp_path / "out", method, calibration_jsonl)
    assert not (tmp_path / "out").exists()
    assert len(worked_on) == (1 if "layers.1" in name else 0)
