"""The parts of bench_quantize.py that a wrong table could come from; no peer is run here."""

import json
import math
import subprocess
import sys

import pytest
import torch
from quantize_peers import methods
from quantize_peers.dither import BLOCK, dithered, dithered_copy
from quantize_peers.evaluate import Evaluator
from quantize_peers.job import SCHEMES, Job
from quantize_peers.results import ResultsFile, Row
from safetensors.torch import load_file, save_file

ROW = Row("as is", "w4-g64", "RTN", "1", "32x512")
WINDOWS = [[1, 5, 9, 200, 41, 7, 7, 300], [2, 2, 90, 511, 18]]


def on_q4_1_grid(rows: int = 6, columns: int = 64) -> torch.Tensor:
    """bf16 weights of 16 levels a block, the ends of which are used, as llama.cpp's quantizer leaves them."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(0, 16, (rows * columns // BLOCK, BLOCK), generator=generator).float()
    levels[:, 0], levels[:, 1] = 0, 15
    step = torch.rand(len(levels), 1, generator=generator) * 0.02 + 0.01
    return (levels * step - 8 * step).to(torch.bfloat16).view(rows, columns)


def test_dithering_moves_a_weight_by_half_a_step_at_most_and_off_the_grid():
    weight = on_q4_1_grid()
    moved = dithered("w", weight, torch.Generator().manual_seed(0))
    blocks = weight.float().view(-1, BLOCK)
    step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
    shift = (moved.float().view(-1, BLOCK) - blocks) / step
    assert float(shift.abs().max()) <= 0.5 + 0.05  # bf16 rounds once more
    assert float(shift.std()) == pytest.approx(1 / math.sqrt(12), abs=0.03)


def test_weights_of_another_grid_are_not_dithered():
    with pytest.raises(ValueError, match="not on a Q4_1 grid"):
        dithered("w", torch.randn(4, 64), torch.Generator())


def test_a_dithered_copy_is_the_same_each_time_and_leaves_the_rest_alone(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    state = {"model.layers.0.mlp.up_proj.weight": on_q4_1_grid(), "model.norm.weight": torch.ones(64)}
    save_file(state, source / "model.safetensors")
    first, second = (load_file(dithered_copy(source, tmp_path / name) / "model.safetensors") for name in "ab")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], state[name])
    assert torch.equal(first["model.norm.weight"], state["model.norm.weight"])


def rounded(weight: torch.Tensor, scheme: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.syspath_prepend(methods.FOLDER)
    import drive_rtn

    return drive_rtn.rounded(weight, SCHEMES[scheme])


@pytest.mark.parametrize(("scheme", "levels"), [("w4-g64", 16), ("w3-g64", 8), ("w8a8", 256)])
def test_rtn_uses_as_many_levels_as_the_bits_give_and_lands_within_half_a_step(scheme, levels, monkeypatch):
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    found = rounded(weight, scheme, monkeypatch)
    group = SCHEMES[scheme].group_size or 128
    for original, row in zip(weight.view(-1, group), found.view(-1, group), strict=True):
        assert len(row.unique()) <= levels
        span = original.abs().max() * 2 if SCHEMES[scheme].symmetric else original.max() - original.min()
        # The scale is rounded to bf16, which moves the outermost levels.
        assert float((row - original).abs().max()) <= float(span) / (levels - 1) * (0.5 + levels / 512)


def test_rtn_to_fp8_has_e4m3_relative_error(monkeypatch):
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)) + 2
    error = (rounded(weight, "fp8", monkeypatch) - weight).abs() / weight.abs().clamp(min=0.1)
    assert 0.01 < float(error.max()) <= 2**-4


def test_the_evaluator_finds_no_divergence_in_the_model_itself_and_the_known_one_in_another(tiny_llama, tmp_path):
    folder = tiny_llama(dtype="bfloat16")
    evaluator = Evaluator(folder, WINDOWS, tmp_path / "reference")
    name = "model.layers.1.mlp.down_proj.weight"
    weight = load_file(folder / "model.safetensors")[name]
    save_file({name: weight}, tmp_path / "same.safetensors")
    save_file({name: weight * 1.5}, tmp_path / "other.safetensors")
    reference, same = evaluator.reference(0), evaluator.measure(0, tmp_path / "same.safetensors", None)
    assert same["kl"] == pytest.approx(0, abs=1e-5)
    assert same["nll"] == pytest.approx(reference["nll"])
    assert same["same_top1"] == same["num_scored"] == len(WINDOWS[0]) - 1
    other = evaluator.measure(0, tmp_path / "other.safetensors", None)
    nll, kl = naive_measures(folder, name, weight * 1.5, WINDOWS[0])
    assert other["nll"] == pytest.approx(nll, rel=1e-3)
    assert other["kl"] == pytest.approx(kl, rel=1e-2)
    assert evaluator.measure(0, tmp_path / "same.safetensors", None) == same  # the weights were put back


def naive_measures(folder, name: str, weight: torch.Tensor, ids: list[int]) -> tuple[float, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        reference = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        model.get_parameter(name).copy_(weight)
        found = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    nll = -sum(float(found[at, token]) for at, token in enumerate(ids[1:]))
    return nll, float((reference.exp() * (reference - found)).sum())


@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_rounding_inputs_changes_the_result_and_ends_with_the_measurement(tiny_llama, tmp_path, activations):
    evaluator = Evaluator(tiny_llama(dtype="bfloat16"), WINDOWS, tmp_path / "reference")
    save_file({}, tmp_path / "dense.safetensors")
    assert evaluator.measure(1, tmp_path / "dense.safetensors", activations)["kl"] > 0
    assert evaluator.measure(1, tmp_path / "dense.safetensors", None)["kl"] == pytest.approx(0, abs=1e-5)


def test_results_are_read_back_and_summed_over_common_windows(tmp_path):
    path, other = tmp_path / "results.jsonl", Row("as is", "bf16", "16 bit", "1", "")
    results = ResultsFile(path)
    results.add(ROW, {"wall_s": 3.0})
    for index in (0, 1):
        results.add(ROW, {"window": index, "num_scored": 10, "nll": 20.0 + index, "kl": 1.0, "same_top1": 9})
    results.add(other, {"window": 1, "num_scored": 10, "nll": 18.0, "kl": 0.0, "same_top1": 10})
    again = ResultsFile(path)
    assert again.quantized == {ROW: {"wall_s": 3.0}}
    assert again.common_windows([ROW, other]) == [1]
    total = again.total(ROW, [0, 1])
    assert (total.num_scored, total.mean_nll, total.mean_kl, total.top1_agreement) == (20, 2.05, 0.1, 0.9)


def test_a_job_is_read_back_as_it_was(tmp_path, monkeypatch):
    job = Job("model", str(tmp_path / "out"), SCHEMES["w8a8"], [[1, 2]], {"text": "t"}, options={"method": "gptq"})
    monkeypatch.setattr("sys.argv", ["drive_rtn.py", str(job.save())])
    assert Job.from_command_line() == job


@pytest.mark.parametrize("own_handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"])
def test_a_driver_that_is_told_to_end_hands_back_its_cost_so_far(tmp_path, own_handler):
    job = Job("model", str(tmp_path), SCHEMES["w8a8"], [[1, 2]], {"text": "t"})
    lines = (
        "import signal, sys, time",
        "from job import Job, Meter",
        "meter = Meter(Job.from_command_line())",
        own_handler,
        "held = bytearray(b'1') * 30_000_000",
        "print('holding', flush=True)",
        "time.sleep(60)",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(job.save())]
    with subprocess.Popen(command, cwd=methods.FOLDER, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline() == "holding\n"
        driver.terminate()
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["is_whole"] is False
    assert 29e6 < measured["above_imports_bytes"] < 40e6
