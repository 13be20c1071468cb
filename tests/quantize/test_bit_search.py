"""--target and --max-kl: what is measured, what is chosen, and what the command makes of it."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import InputError
from llmq.quantize.bit_search import Goal, check_goal, check_searchable, choose, search_space, with_allocation
from llmq.quantize.calibration import load_calibration, load_tokenizer
from llmq.quantize.formats.scheme import FormatError
from llmq.quantize.preflight import preflight
from llmq.quantize.recipe import Recipe, Rule
from llmq.quantize.sensitivity import load_units, measure_sensitivity, save_units

SENSITIVE = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tiny_llama):
    return tiny_llama(dtype="bfloat16")


def plan_of(source, tmp_path, method="gptq", **options):
    return preflight(read_checkpoint(source), Recipe.of(method, **options), tmp_path / "out")


@pytest.fixture(scope="module")
def measured(source, calibration_jsonl, tmp_path_factory):
    """(plan, space, units, weights that damage was asked about), with one linear that matters a hundredfold."""
    plan = plan_of(source, tmp_path_factory.mktemp("plan"))
    space = search_space(plan)
    calibration = load_calibration(str(calibration_jsonl), load_tokenizer(source), num_samples=8, seq_len=32)
    original = load_file(source / "model.safetensors")
    asked = []

    def damage(weights):
        asked.append(set(weights))
        error = sum(float((w - original[f"{name}.weight"].float()).square().mean()) for name, w in weights.items())
        return error * (100.0 if SENSITIVE in weights else 1.0)

    units = measure_sensitivity(plan, space.shared, calibration, damage)
    return plan, space, units, asked


def test_siblings_are_one_unit_and_each_is_measured_once(measured):
    plan, space, units, asked = measured
    names = [{target.name.rsplit(".", 1)[1] for target in shared.targets} for shared in space.shared[:4]]
    assert names == [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]
    assert len(asked) == len(units) == 4 * plan.source.architecture.num_layers
    assert {name for group in asked for name in group} == {target.name for target in plan.targets}


def test_more_bits_and_smaller_groups_cost_more_bytes_and_do_less_damage(measured):
    _, _, units, _ = measured
    for unit in units:
        by_label = {choice.label: choice for choice in unit.choices}
        three, four, eight = (by_label[f"int{bits} g32 asymmetric"] for bits in (3, 4, 8))
        assert three.damage > four.damage > eight.damage > 0
        assert three.num_bytes < four.num_bytes < eight.num_bytes


def test_the_sensitive_linear_gets_the_bits(measured):
    plan, space, units, _ = measured
    allocation = choose(plan, space, units, Goal(bits=5.5))
    bits = {
        shared.targets[0].name: space.settings[choice.label].bits
        for shared, choice in zip(space.shared, allocation.choices, strict=True)
    }
    assert bits[SENSITIVE] == 8
    assert min(bits.values()) < 8
    num_weights = sum(t.out_features * t.in_features for t in plan.targets)
    assert allocation.num_bytes * 8 / num_weights <= 5.5
    chosen = with_allocation(plan, space, allocation)
    assert chosen.settings[SENSITIVE].bits == 8
    assert len(set(chosen.settings.values())) > 1


def test_goals_out_of_reach_say_what_can_be_had(measured):
    plan, space, units, _ = measured
    for bits in (2.0, 17.0):
        with pytest.raises(
            InputError, match=r"in 3 or 4 or 8 bits with their scales, can be from 3\.\d+ to 8\.\d+ bits"
        ):
            check_goal(plan, space, Goal(bits=bits))
    sizes = [[choice.num_bytes for choice in unit.choices] for unit in units]
    weights = sum(target.out_features * target.in_features for target in plan.targets)
    for bound in (sum(map(min, sizes)), sum(map(max, sizes))):
        check_goal(plan, space, Goal(bits=bound * 8 / weights))
        assert sum(one.num_bytes for one in choose(plan, space, units, Goal(bits=bound * 8 / weights)).choices) == bound
    with pytest.raises(InputError, match="with the most bits everywhere about"):
        choose(plan, space, units, Goal(max_kl=1e-30))


def test_a_measurement_is_kept_for_the_same_thing_only(measured, tmp_path):
    _, _, units, _ = measured
    file = tmp_path / "units.json"
    save_units(units, {"model": "a"}, file)
    assert load_units({"model": "a"}, file) == units
    assert load_units({"model": "b"}, file) is None
    assert load_units({"model": "a"}, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("target", "max_kl", "message"),
    [("small", None, "bits a weight are expected"), ("4", 0.1, "one of them"), (None, -1.0, "above 0")],
)
def test_goals_that_make_no_sense_are_refused(target, max_kl, message):
    with pytest.raises(InputError, match=message):
        Goal.of(target, max_kl)


def test_recipes_without_a_choice_are_refused():
    with pytest.raises(InputError, match="--fp8 has one scheme only"):
        check_searchable(Recipe.of("fp8"))
    with pytest.raises(InputError, match="use one"):
        check_searchable(Recipe.of("awq", rules=(Rule(("down_proj",), None),)))


def test_only_what_the_format_stores_is_searched(source, tmp_path):
    plan = plan_of(source, tmp_path, "awq", format="awq")
    space = search_space(plan)
    assert {settings.bits for shared in space.shared for settings in map(space.settings.get, shared.schemes)} == {4}
    with pytest.raises(FormatError, match="one scheme for all linears, not int4 g64 asymmetric, int4 g32 asymmetric"):
        check_goal(plan, space, Goal(max_kl=0.1))


@pytest.mark.parametrize(("flags", "key"), [(["--target", "5bits"], "bits"), (["--max-kl", "0.05"], "max_kl")])
def test_the_command_reaches_its_goal_and_proves_it(source, calibration_jsonl, tmp_path, flags, key):
    out = tmp_path / "out"
    command = ["quantize", str(source), "--awq", "--calib", str(calibration_jsonl), "--samples", "8", "--seq-len", "32"]
    done = subprocess.run(
        [sys.executable, "-m", "llmq", *command, *flags, "-o", str(out), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((out / "quantization_report.json").read_text())
    assert report["search"]["goal"].keys() == {key}
    assert report["proof"]["num_positions"] > 100
    if key == "bits":
        assert report["bits_per_quantized_weight"] <= 5.0
        assert len({entry["scheme"] for entry in report["linears"]}) > 1
    else:
        assert 0 < report["proof"]["mean_kl"] <= 0.05
    assert "Against the original" in (out / "quantization_report.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert all(torch.isfinite(t).all() for t in load_file(out / "model.safetensors").values() if t.is_floating_point())


def test_a_search_that_was_killed_goes_on_with_what_it_tried(source, calibration_jsonl, tmp_path, monkeypatch):
    """Killed in its second try, it quantizes and measures the first one no more; the result is that of a search that
    was left alone. The measured divergences are made up: far below what is allowed, then near it."""
    from llmq.cli import quantize_proof, quantize_search
    from llmq.quantize.pipeline import quantize_model

    calibration = load_calibration(str(calibration_jsonl), load_tokenizer(source), num_samples=8, seq_len=32)
    calls = {"quantized": 0, "measured": 0}

    def search(out, kls, dies_at=None):
        calls.update(quantized=0, measured=0)

        def run(plan):
            calls["quantized"] += 1
            if calls["quantized"] == dies_at:
                raise KeyboardInterrupt
            return quantize_model(plan, calibration)

        def measure(*_):
            calls["measured"] += 1
            return {"mean_kl": kls.pop(0)}

        monkeypatch.setattr(quantize_proof, "measure", measure)
        monkeypatch.setattr(quantize_search.Search, "_damage", lambda self: lambda weights: 0.01)
        monkeypatch.setattr("llmq.quantize.report_html._proof", lambda proof: None)
        plan = preflight(read_checkpoint(source), Recipe.of("rtn"), out)
        search = quantize_search.Search(plan, search_space(plan), Goal(max_kl=0.02), "cpu")
        return search.run(calibration, run)

    whole = search(tmp_path / "whole", [0.001, 0.019])
    assert calls == {"quantized": 2, "measured": 2}
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        search(out, [0.001], dies_at=2)
    assert not out.exists()
    resumed = search(out, [0.019])
    assert calls == {"quantized": 1, "measured": 1}
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (resumed.proof, resumed.search) == (whole.proof, whole.search)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
