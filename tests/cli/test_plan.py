"""`llmq plan`: the predicted table, and rows measured by verbs that a stub stands in for."""

import json
import subprocess
from pathlib import Path

import pytest
from published_configs import LLAMA_8B
from typer.testing import CliRunner

from llmq.cli import plan_measure
from llmq.cli.plan import app
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.safetensors_file import TensorInfo, write_file


@pytest.fixture
def llama_8b(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def asked(*args) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(one) for one in args], catch_exceptions=False)
    return done.exit_code, done.stdout


def test_every_way_has_a_verdict_latencies_and_a_price(llama_8b):
    code, shown = asked(llama_8b, "--slo", "ttft=1s,tpot=30ms@p99", "--gpu", "h100,t4", "--tp", "1,2", "--json")
    found = json.loads(shown)
    assert code == 0
    ways = found["candidates"]
    assert len(ways) == 2 * 2 * 4 * 2  # GPUs, ranks, weights, KV
    best = ways[0]
    assert best["verdict"] == "PASS"
    for name, limit in (("ttft", 1.0), ("tpot", 0.03)):
        interval = best["latency_s"][name]
        assert interval["low"] < interval["expected"] < interval["high"] <= limit
    dollars = best["dollars_per_million_tokens"]["output"]
    assert dollars == pytest.approx(
        best["price_per_hour"] * best["tensor_parallel"] / 3600 / best["output_tokens_per_s"] * 1e6
    )
    assert {way["verdict"] for way in ways} > {"PASS"}


def test_a_table_for_people(llama_8b):
    code, shown = asked(llama_8b, "--slo", "tpot=30ms", "--gpu", "h100,mi325x", "--top", "3")
    assert code == 0
    for words in (
        "1×H100 SXM",
        "TTFT ms",
        "The first 3 of",
        "No price is known of MI325X",
        "$2.95 an hour",
        "Predicted",
    ):
        assert words in shown
    codes = {tpot: asked(llama_8b, "--slo", f"tpot={tpot}", "--gpu", "h100", "--tp", "1")[0] for tpot in ("5ms", "1ms")}
    assert codes == {"5ms": 3, "1ms": 1}


def test_a_quantized_checkpoint_is_planned_as_it_is_stored(llama_8b):
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
    (llama_8b / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": fp8}))
    ways = json.loads(asked(llama_8b, "--slo", "tpot=30ms", "--gpu", "h100", "--tp", "1", "--json")[1])["candidates"]
    assert {way["weights"] for way in ways} == {"fp8 in blocks"}
    assert 8e9 < ways[0]["weight_bytes"] < 9.5e9


def test_a_price_of_ones_own(llama_8b):
    def dollars(*args) -> float:
        found = json.loads(asked(llama_8b, "--slo", "tpot=30ms", "--gpu", "h100", "--tp", "1", "--json", *args)[1])
        return found["candidates"][0]["dollars_per_million_tokens"]["total"]

    assert dollars("--price-per-hour", "5.9") == pytest.approx(2 * dollars())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--slo", "ttfx=1s"), "'ttfx=1s' is no limit"),
        (("--slo", "tpot=1s", "--tp", "3"), "--tp 3: 3; one of 1, 2, 4, 8"),
        (("--slo", "tpot=1s", "--gpu", "h1000"), "no GPU 'h1000'"),
        (("--slo", "tpot=1s", "--kv-dtype", "fp9"), "--kv-dtype fp9: one of"),
        (("--slo", "tpot=1s", "--max-drop", "1%"), "--max-drop is of what is measured: give --measure"),
        (("--slo", "tpot=1s", "--measure", "--max-drop", "1%"), "give --data or --tasks"),
        (("--slo", "tpot=1s", "--prompt-tokens", "1m"), "the model's own context is 131,072 tokens"),
        (("--slo", "tpot=1s", "--weights", "w5"), "--weights w5: give a scheme"),
        (("--slo", "tpot=1s", "--measure", "--weights", "w3"), "--measure makes bf16, fp8, int8, w4"),
    ],
)
def test_what_cannot_be_asked(llama_8b, args, said):
    if "--measure" in args:
        (llama_8b / "model.safetensors").touch()
    with pytest.raises(InputError, match=said):
        asked(llama_8b, *args)


@pytest.fixture
def tiny(tmp_path):
    """A folder with the config and the one tensor of a model."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {**LLAMA_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(config))
    tensor = TensorInfo("model.norm.weight", "BF16", (64,), 128, "model.safetensors")
    write_file(folder / "model.safetensors", [tensor], iter([bytes(128)]))
    return folder


@pytest.fixture
def verbs(monkeypatch, tiny):
    """Stands in for the verbs: what each is asked, and the figures that it answers with."""
    answers = {
        "tiny": {"rate": 2.0, "tokens": 100.0},
        "tiny-fp8": {"rate": 3.0, "tokens": 150.0, "drop": 0.004},
        "tiny-w4": {"rate": 4.0, "tokens": 200.0, "drop": 0.08, "code": 1},
    }
    calls = []

    def run(command, **_):
        words = command[3:]
        calls.append(words)
        name = words[1].rpartition("/")[2]
        if words[0] == "quantize":
            out = words[words.index("-o") + 1]
            Path(out).mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                Path(out, file).write_bytes((tiny / file).read_bytes())
            report = {"source": str(tiny)}
            Path(out, "quantization_report.json").write_text(json.dumps(report))
            return subprocess.CompletedProcess(command, 0, "")
        known = answers[name]
        if words[0] == "bench":
            point = {
                "requests_per_s_offered": known["rate"],
                "goodput": {"output_tokens_per_s": known["tokens"]},
                "latency_s": {one: {"p99": 0.1} for one in ("ttft", "tpot")},
            }
            found = {"best_rate": known["rate"], "points": [{**point, "requests_per_s_offered": 99.0}, point]}
            return subprocess.CompletedProcess(command, known.get("bench", 0), json.dumps(found))
        found = {"comparison": {"overall": {"drop": known["drop"]}}}
        return subprocess.CompletedProcess(command, known.get("code", 0), json.dumps(found))

    monkeypatch.setattr(plan_measure.subprocess, "run", run)
    return answers, calls


def measured(tiny, tmp_path, *args) -> tuple[int, dict]:
    (tmp_path / "own.jsonl").touch()
    slo = ("--slo", "ttft=1s,tpot=100ms", "--prompt-tokens", "64", "--output-tokens", "16")
    asked_of = ("--data", tmp_path / "own.jsonl", "--max-drop", "1%", "--work", tmp_path / "work")
    code, shown = asked(tiny, "--measure", "--weights", "bf16,fp8,w4", *slo, *asked_of, "--json", *args)
    return code, json.loads(shown)


def test_the_fastest_that_keeps_slo_and_drop_is_recommended_with_its_commands(tiny, tmp_path, verbs):
    code, found = measured(tiny, tmp_path)
    assert code == 0
    assert [(row["weights"], row["speed"], row["quality"]) for row in found["measured"]] == [
        ("bf16", "PASS", "original"),
        ("fp8", "PASS", "PASS"),
        ("w4", "PASS", "FAIL"),
    ]
    best = found["recommendation"]
    assert (best["weights"], best["best_rate"], best["output_tokens_per_s"]) == ("fp8", 3.0, 150.0)
    quantize, bench, evaluate = (command.split() for command in best["commands"])
    out = str(tmp_path / "work" / "tiny-fp8")
    assert quantize == ["llmq", "quantize", str(tiny), "--fp8", "--no-proof", "-o", out]
    assert bench[:4] == ["llmq", "bench", out, "--sweep"]
    assert bench[-4:] == ["--prompt-tokens", "64", "--output-tokens", "16"]
    assert evaluate[2:5] == [out, "--baseline", str(tiny)]
    assert found["candidates"] == []  # no --gpu


def test_a_table_of_what_was_measured(tiny, tmp_path, verbs):
    (tmp_path / "own.jsonl").touch()
    flags = ("--data", tmp_path / "own.jsonl", "--max-drop", "1%", "--work", tmp_path / "work")
    code, shown = asked(tiny, "--measure", "--weights", "bf16,w4,fp8", "--slo", "tpot=100ms", *flags)
    assert code == 0
    for words in ("original", "-8.0%", "-0.4%", "Recommended: fp8, which keeps the SLO at 3 requests/s, 1.50 times"):
        assert words in shown
    assert f"llmq serve {tmp_path / 'work' / 'tiny-fp8'}" in shown


def test_what_was_made_by_an_earlier_run_is_taken_again(tiny, tmp_path, verbs):
    _, calls = verbs
    measured(tiny, tmp_path)
    first = [words[0] for words in calls]
    calls.clear()
    code, found = measured(tiny, tmp_path)
    assert code == 0
    assert first.count("quantize") == 2
    assert [words[0] for words in calls].count("quantize") == 0
    assert "quantize" in found["recommendation"]["commands"][0]
    (tmp_path / "work" / "tiny-w4" / "quantization_report.json").write_text(json.dumps({"source": "/another"}))
    with pytest.raises(FailedError, match="not made of"):
        measured(tiny, tmp_path)


def test_a_checkpoint_made_with_other_options_is_refused_before_anything_is_measured(tiny, tmp_path, verbs):
    _, calls = verbs
    few = ("--quantize-options", "--samples 8")
    measured(tiny, tmp_path, *few)
    assert (tmp_path / "work" / "tiny-w4.options").read_text() == "--awq --samples 8\n"
    assert (tmp_path / "work" / "tiny-fp8.options").read_text() == "--fp8\n"  # which takes no calibration
    calls.clear()
    assert measured(tiny, tmp_path, *few)[0] == 0
    assert "quantize" not in [words[0] for words in calls]
    calls.clear()
    with pytest.raises(FailedError, match=r"tiny-w4 was made by llmq quantize --awq --samples 8, not by --awq:"):
        measured(tiny, tmp_path)
    (tmp_path / "work" / "tiny-w4.options").unlink()
    with pytest.raises(FailedError, match="not recorded"):
        measured(tiny, tmp_path, *few)
    assert not calls


def test_none_that_keeps_both_is_exit_code_1(tiny, tmp_path, verbs):
    answers, _ = verbs
    for known in answers.values():
        known |= {"rate": None, "bench": 1}
    code, found = measured(tiny, tmp_path)
    assert (code, found["recommendation"]) == (1, None)


def test_too_few_requests_or_items_decide_nothing(tiny, tmp_path, verbs):
    answers, _ = verbs
    for known in answers.values():
        known["bench"] = 3
    code, found = measured(tiny, tmp_path)
    assert (code, found["recommendation"]) == (3, None)
    assert [row["speed"] for row in found["measured"]] == ["NOT ENOUGH"] * 3
