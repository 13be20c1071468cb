"""What is refused in the first second, and in which words."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmq.profiles.checkpoint import Checkpoint, read_checkpoint
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.safetensors_file import TensorInfo
from llmq.quantize import preflight as preflight_module
from llmq.quantize.formats.scheme import FormatError
from llmq.quantize.preflight import preflight
from llmq.quantize.recipe import LinearSettings, MethodOptions, Recipe, Rule


def fake_checkpoint(tmp_path, hidden=576, ffn=1536, layers=2, **config):
    """A checkpoint of which only the headers and a tokenizer's file exist: SmolLM2's shapes."""
    (tmp_path / "tokenizer.json").touch()
    heads = hidden // 64 if hidden % 192 == 0 else 3
    kv = hidden // 3
    shapes = {"model.embed_tokens.weight": (1000, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"{prefix}{name}.weight"] = shape
    tensors = {
        name: TensorInfo(name, "BF16", shape, 2 * shape[0] * (shape[1] if len(shape) > 1 else 1), "model.safetensors")
        for name, shape in shapes.items()
    }
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **config,
    }
    return Checkpoint(tmp_path, config, tensors, config.get("quantization_config"))


def refuse(checkpoint, recipe, out, error=InputError):
    started = time.process_time()
    with pytest.raises(error) as raised:
        preflight(checkpoint, recipe, out)
    assert time.process_time() - started < 1
    assert not out.exists() or out.is_file() or any(out.iterdir())
    return str(raised.value)


def test_a_group_size_that_does_not_divide_names_who_and_what_would(tmp_path):
    message = refuse(fake_checkpoint(tmp_path), Recipe.of("gptq", group_size="128"), tmp_path / "out")
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj: 576 inputs = 4·128 + 64" in message
    assert "down_proj" not in message  # 1536 = 12·128: not its fault
    assert "--group-size 64 or 32" in message
    assert "--ignore" in message
    assert "12 of 14" in message
    plan = preflight(fake_checkpoint(tmp_path), Recipe.of("gptq", group_size="64"), tmp_path / "out")
    assert plan.recipe.group_size == 64


def test_auto_takes_the_largest_that_divides_and_says_why(tmp_path):
    plan = preflight(fake_checkpoint(tmp_path), Recipe.of("awq"), tmp_path / "out")
    assert plan.recipe.group_size == 64
    assert "128 does not divide [576]" in plan.group_size_reason
    plan = preflight(fake_checkpoint(tmp_path, hidden=1152), Recipe.of("awq"), tmp_path / "out")
    assert plan.recipe.group_size == 128


def test_auto_looks_at_what_is_quantized_only(tmp_path):
    only_down = tuple(f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up"))
    plan = preflight(fake_checkpoint(tmp_path), Recipe.of("awq", ignore=only_down), tmp_path / "out")
    assert plan.recipe.group_size == 128


def test_auto_with_nothing_that_divides_proposes_channel(tmp_path):
    message = refuse(fake_checkpoint(tmp_path, hidden=570), Recipe.of("awq"), tmp_path / "out")
    assert "--group-size channel" in message
    assert "570" in message


def test_channel_divides_everything(tmp_path):
    recipe = Recipe.of("awq", group_size="channel")
    assert (
        preflight(fake_checkpoint(tmp_path, hidden=570), recipe, tmp_path / "out").recipe.scheme.strategy == "channel"
    )


def test_ignore_patterns_without_a_match_are_named_with_near_matches(tmp_path):
    recipe = Recipe.of("gptq", ignore=(r"re:.*mlp\.gate$", "lm_heads", "down_proj"))
    message = refuse(fake_checkpoint(tmp_path), recipe, tmp_path / "out")
    assert r"'re:.*mlp\\.gate$': near to it are" in message
    assert "mlp.gate_proj" in message
    assert "'lm_heads': near to it are lm_head" in message
    assert "down_proj" not in message.splitlines()[0]


@pytest.mark.parametrize(
    ("pattern", "left"),
    [("down_proj", 2), ("layers.0", 7), ("layers.1.mlp.down_proj", 1), (r"re:.*layers\.0\..*", 7), ("lm_head", 0)],
)
def test_ignore_patterns_that_match(tmp_path, pattern, left):
    plan = preflight(fake_checkpoint(tmp_path), Recipe.of("awq", ignore=(pattern,)), tmp_path / "out")
    assert len(plan.targets) == 14 - left
    assert len(plan.selection.left_alone) == left + 1  # and the head


def test_a_layers_number_is_a_word_of_its_own(tmp_path):
    plan = preflight(fake_checkpoint(tmp_path, layers=12), Recipe.of("awq", ignore=("layers.1",)), tmp_path / "out")
    assert len(plan.targets) == 11 * 7


def test_leaving_out_some_of_the_linears_that_run_as_one_is_refused_with_the_names_that_lack(tmp_path):
    def message(*ignore):
        return refuse(fake_checkpoint(tmp_path), Recipe.of("awq", ignore=ignore), tmp_path / "out")

    words = message("v_proj", "layers.1.self_attn")
    assert "model.layers.0.self_attn q_proj, k_proj, v_proj run as one linear" in words
    assert "16 bit (--ignore v_proj): model.layers.0.self_attn.v_proj" in words
    assert "leave the rest of them in 16 bit too: --ignore q_proj --ignore k_proj; or" in words
    assert "too: --ignore gate_proj; or" in message("up_proj")
    # Of one layer alone: names that leave the other layer as it is.
    assert "too: --ignore model.layers.1.mlp.gate_proj; or" in message("layers.1.mlp.up_proj")
    assert "and so do those of 1 other set" in message("up_proj")


@pytest.mark.parametrize(
    "ignore", [(), ("layers.0",), ("down_proj", "o_proj"), ("mlp",), ("q_proj", "k_proj", "v_proj")]
)
def test_leaving_out_all_of_them_or_what_runs_alone_is_fine(tmp_path, ignore):
    assert preflight(fake_checkpoint(tmp_path), Recipe.of("awq", ignore=ignore), tmp_path / "out").warnings == ()


def test_a_rule_that_leaves_out_some_of_them_is_refused_too(tmp_path):
    recipe = Recipe.of("awq", rules=(Rule(("re:.*gate_proj",), None),))
    message = refuse(fake_checkpoint(tmp_path), recipe, tmp_path / "out")
    assert "16 bit (the recipe ignores re:.*gate_proj)" in message
    assert "--ignore up_proj" in message


def test_where_nothing_is_rounded_nothing_must_be_alike(tmp_path):
    recipe = Recipe.of("smoothquant", ignore=("up_proj",), options=MethodOptions(smooth_only=True))
    assert preflight(fake_checkpoint(tmp_path), recipe, tmp_path / "out").schemes == {}


def test_int8_scales_of_the_kv_cache_are_said_to_be_ours_alone(tmp_path):
    def warnings(kv):
        return preflight(fake_checkpoint(tmp_path), Recipe.of("rtn", kv=kv), tmp_path / "out").warnings

    assert warnings("fp8") == ()
    assert "vLLM takes static scales of FP8 alone" in warnings("int8")[0]


def test_ignoring_everything_is_refused(tmp_path):
    assert "nothing is left" in refuse(fake_checkpoint(tmp_path), Recipe.of("awq", ignore=("layers",)), tmp_path / "o")


def test_an_already_quantized_model_is_refused_by_method_and_bits(tmp_path, shared):
    source = read_checkpoint(shared / "interop" / "llmc-gptq-w4a16")
    message = refuse(source, Recipe.of("awq"), tmp_path / "out2")
    assert "already quantized" in message
    assert "compressed-tensors, 4-bit int weights" in message
    assert "original" in message
    assert "gptq, 4-bit" in refuse(
        read_checkpoint(shared / "interop" / "autogptq-w4g128-sym"), Recipe.of("awq"), tmp_path / "out2"
    )


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    assert "'mamba'" in refuse(fake_checkpoint(tmp_path, model_type="mamba"), Recipe.of("awq"), tmp_path / "out")


def test_an_architecture_without_a_mapping_is_refused_by_awq(tmp_path):
    message = refuse(fake_checkpoint(tmp_path, model_type="stablelm"), Recipe.of("awq"), tmp_path / "out")
    assert "'stablelm'" in message
    assert "qwen2" in message
    preflight(fake_checkpoint(tmp_path, model_type="stablelm"), Recipe.of("rtn"), tmp_path / "out")


def test_out_that_holds_something_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    preflight(fake_checkpoint(tmp_path), Recipe.of("rtn"), tmp_path / "out")  # empty: fine
    (tmp_path / "out" / "file").touch()
    assert "not empty" in refuse(fake_checkpoint(tmp_path), Recipe.of("rtn"), tmp_path / "out")
    assert "exists" in refuse(fake_checkpoint(tmp_path), Recipe.of("rtn"), tmp_path / "out" / "file")


def test_a_name_that_no_folder_can_have_is_refused(tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for out, words in (("dangling", "exists already"), ("x" * 240, "too long")):
        assert words in refuse(fake_checkpoint(tmp_path), Recipe.of("rtn"), tmp_path / out).lower()
    with pytest.raises(InputError, match="File name too long"):
        preflight(fake_checkpoint(tmp_path), Recipe.of("rtn"), tmp_path / ("y" * 300))
    with pytest.raises(InputError, match="/dev/null exists already"):
        preflight(fake_checkpoint(tmp_path), Recipe.of("rtn"), Path("/dev/null"))


def test_weights_that_are_not_what_the_config_says_are_refused(tmp_path):
    checkpoint = fake_checkpoint(tmp_path)
    del checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    message = refuse(checkpoint, Recipe.of("rtn"), tmp_path / "out")
    assert "has no tensor model.layers.1.mlp.up_proj.weight, which its config.json calls for" in message


@pytest.mark.parametrize(
    ("changes", "loaders"),
    [
        ({"method": "awq"}, ("llmq", "vllm", "transformers")),
        ({"method": "awq", "bits": 3}, ("llmq", "transformers")),
        ({"method": "gptq", "format": "gptq"}, ("llmq", "vllm", "gptqmodel")),
        ({"method": "rtn", "kv": "int8"}, ("llmq", "transformers")),
        ({"method": "fp8", "fp8_scheme": "block"}, ("llmq", "vllm")),  # transformers: not where blocks do not divide
        ({"method": "rtn", "rules": (Rule(("o_proj",), LinearSettings.of("rtn", bits=3)),)}, ("llmq", "transformers")),
        ({"method": "smoothquant", "options": MethodOptions(smooth_only=True)}, ("llmq", "transformers", "vllm")),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_plan_says_who_loads_what_it_makes(tmp_path, changes, loaders):
    assert preflight(fake_checkpoint(tmp_path), Recipe.of(**changes), tmp_path / "out").loaders == loaders


def test_a_layout_that_cannot_hold_a_plan_is_refused(tmp_path):
    rule = Rule(("o_proj",), LinearSettings.of("rtn", group_size="32"))
    mixed = Recipe.of("rtn", format="awq", rules=(rule,))
    assert "one scheme for all linears, not int4 g64" in refuse(
        fake_checkpoint(tmp_path), mixed, tmp_path / "out", FormatError
    )
    with_kv = Recipe.of("rtn", format="awq", kv="fp8")
    assert "no place for scales" in refuse(fake_checkpoint(tmp_path), with_kv, tmp_path / "out", FormatError)
    odd = fake_checkpoint(tmp_path, ffn=1540)
    message = refuse(odd, Recipe.of("rtn", group_size="channel", format="awq"), tmp_path / "out", FormatError)
    assert "does not store a [1540, 576] weight" in message
    assert "outputs must be a multiple of 8" in message


def test_out_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    message = refuse(fake_checkpoint(tmp_path), Recipe.of("rtn"), tmp_path / "file" / "out")
    assert "not a folder that can be written to" in message


def test_a_full_disk_is_found_out_beforehand(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda _: usage)
    assert "free" in refuse(fake_checkpoint(tmp_path), Recipe.of("rtn"), tmp_path / "out")


def test_missing_extras_are_named_with_the_command_that_installs_them(tmp_path, monkeypatch):
    for missing in ("transformers", "llmcompressor"):
        monkeypatch.setattr(preflight_module.importlib.util, "find_spec", lambda name, m=missing: name != m or None)
        recipe = Recipe.of("gptq", backend="llmcompressor")
        message = refuse(fake_checkpoint(tmp_path), recipe, tmp_path / "out", FailedError)
        assert f"--gptq needs {missing}, not installed here: pip install 'llmq-toolkit[quantize]'" in message
    preflight(fake_checkpoint(tmp_path), Recipe.of("rtn"), tmp_path / "out")  # ours, and needs neither


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("awq", {"bits": 5}, "--bits 5"),
        ("smoothquant", {"bits": 4}, "--rtn"),
        ("rtn", {"options": MethodOptions(damp=0.1)}, "--damp is GPTQ's"),
        ("gptq", {"options": MethodOptions(damp=-1.0)}, "above 0"),
        ("gptq", {"options": MethodOptions(alpha=0.5)}, "--alpha is SmoothQuant's"),
        ("smoothquant", {"options": MethodOptions(alpha=1.5)}, "from 0"),
        ("rtn", {"options": MethodOptions(smooth_only=True)}, "not --rtn"),
        ("rtn", {"kv": "fp4"}, "fp8 or int8 is expected"),
        ("rtn", {"backend": "llmcompressor"}, "--backend llmcompressor does not run --rtn"),
        ("fp8", {"fp8_scheme": "tensor"}, "dynamic"),
        ("awq", {"fp8_scheme": "static"}, "--fp8-scheme does not apply"),
        ("fp8", {"bits": 4}, "--awq"),
        ("fp8", {"group_size": "128"}, "--group-size does not apply to --fp8"),
        ("smoothquant", {"symmetric": False}, "--sym/--asym does not apply"),
        ("awq", {"group_size": "large"}, "--group-size large"),
        ("awq", {"group_size": "12"}, "--group-size 12"),
    ],
)
def test_options_that_a_method_does_not_honour_are_refused(method, options, words):
    with pytest.raises(InputError, match=words):
        Recipe.of(method, **options)


def test_a_head_stored_although_tied_is_not_counted_twice(tmp_path):
    checkpoint = fake_checkpoint(tmp_path)
    alone = preflight(checkpoint, Recipe.of("rtn"), tmp_path / "out").predicted_bytes
    checkpoint.tensors["lm_head.weight"] = TensorInfo("lm_head.weight", "BF16", (1000, 576), 1152000, "x")
    assert preflight(checkpoint, Recipe.of("rtn"), tmp_path / "out").predicted_bytes == alone


def test_checking_imports_no_torch():
    """What is refused in the first second cannot wait for torch to be imported."""
    code = "import sys, llmq.quantize.preflight, llmq.quantize.calibration, llmq.quantize.formats.legal; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_without_a_tokenizer_is_refused_before_work(tiny_llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama(), folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        preflight(read_checkpoint(folder), Recipe.of("rtn", group_size="32"), tmp_path / "out")


MLP8 = Rule(("mlp",), LinearSettings.of("rtn", bits=8, group_size="32"))


def test_a_rule_gives_its_linears_settings_of_their_own(tmp_path):
    first = Rule(("down_proj",), None)
    last = Rule(("layers.0.mlp.down_proj",), LinearSettings.of("rtn", group_size="channel"))
    recipe = Recipe.of("rtn", rules=(MLP8, first, last), group_size="64")
    plan = preflight(fake_checkpoint(tmp_path), recipe, tmp_path / "out")
    names = {name.removeprefix("model.layers."): scheme.name for name, scheme in plan.schemes.items()}
    assert names["0.self_attn.q_proj"] == "int4 g64 asymmetric"
    assert names["0.mlp.up_proj"] == "int8 g32 asymmetric"
    assert names["0.mlp.down_proj"] == "int4 per channel asymmetric"  # the last rule that names it
    assert "1.mlp.down_proj" not in names
    assert "the recipe ignores down_proj" in plan.selection.left_alone["model.layers.1.mlp.down_proj"]
    assert "int8 g32 asymmetric (4 linears)" in plan.scheme_name


def test_auto_is_resolved_for_each_rule_by_itself(tmp_path):
    rule = Rule(("down_proj",), LinearSettings.of("rtn"))
    recipe = Recipe.of("rtn", bits=8, rules=(rule,))
    plan = preflight(fake_checkpoint(tmp_path), recipe, tmp_path / "out")
    assert {s.group_size for name, s in plan.settings.items() if "down" in name} == {128}
    assert {s.group_size for name, s in plan.settings.items() if "down" not in name} == {64}


def test_a_rule_that_names_nothing_is_refused(tmp_path):
    rule = Rule(("up_projs",), LinearSettings.of("rtn", bits=8))
    message = refuse(fake_checkpoint(tmp_path), Recipe.of("rtn", rules=(rule,)), tmp_path / "out")
    assert "'up_projs': near to it are up_proj" in message
    assert message.startswith("1 recipe pattern matches no linear")


@pytest.mark.parametrize("kind", ["k_proj", "gate_proj"])
def test_siblings_that_run_as_one_must_share_a_scheme(tmp_path, kind):
    rule = Rule((kind,), LinearSettings.of("rtn", bits=8, group_size="64"))
    message = refuse(fake_checkpoint(tmp_path), Recipe.of("rtn", rules=(rule,), group_size="64"), tmp_path / "out")
    assert "must share one scheme" in message
    assert "int8 g64 asymmetric: model.layers.0." in message
    others = {"k_proj": '"q_proj", "k_proj", "v_proj"', "gate_proj": '"gate_proj", "up_proj"'}
    assert f"match = [{others[kind]}]" in message


def test_a_search_can_give_other_settings_to_a_plan(tmp_path):
    plan = preflight(fake_checkpoint(tmp_path), Recipe.of("rtn", group_size="64"), tmp_path / "out")
    down = [name for name in plan.settings if "down" in name]
    changed = plan.with_settings(
        dict.fromkeys(down, LinearSettings.of("rtn", bits=8, group_size="128", symmetric=True))
    )
    assert changed.predicted_bytes > plan.predicted_bytes
    alone = LinearSettings.of("rtn", bits=8, group_size="32", symmetric=True)
    with pytest.raises(InputError, match="must share one scheme"):
        plan.with_settings({"model.layers.1.mlp.up_proj": alone})


def test_a_mixture_nobody_knows_is_refused_by_name(tmp_path):
    checkpoint = fake_checkpoint(tmp_path, model_type="qwen2_moe")
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    checkpoint.tensors[name] = TensorInfo(name, "BF16", (64, 576), 2 * 64 * 576, "x")
    assert "'qwen2_moe' is a mixture" in refuse(checkpoint, Recipe.of("rtn"), tmp_path / "out")


def test_experts_in_one_tensor_are_refused_by_name(tmp_path):
    checkpoint = fake_checkpoint(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    checkpoint.tensors[name] = TensorInfo(name, "BF16", (8, 64, 576), 2 * 8 * 64 * 576, "x")
    assert "all experts of a layer in one tensor" in refuse(checkpoint, Recipe.of("rtn"), tmp_path / "out")


def test_layers_outside_the_decoder_are_refused_by_name(tmp_path):
    checkpoint = fake_checkpoint(tmp_path)
    name = "vision_tower.encoder.layers.0.mlp.fc1.weight"
    checkpoint.tensors[name] = TensorInfo(name, "BF16", (64, 576), 2 * 64 * 576, "x")
    assert name in refuse(checkpoint, Recipe.of("rtn"), tmp_path / "out")


def test_blocks_that_do_not_divide_a_linear_are_warned_of(tmp_path):
    recipe = Recipe.of("fp8", fp8_scheme="block")
    (warning,) = preflight(fake_checkpoint(tmp_path), recipe, tmp_path / "out").warnings
    assert "do not divide 14 of 14 linears (q_proj: 576×576)" in warning
    assert "transformers does not load it" in warning
    assert preflight(fake_checkpoint(tmp_path, hidden=768), recipe, tmp_path / "out").warnings == ()
