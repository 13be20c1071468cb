"""The whole loop in this process, with a tiny model in place of SmolLM2 and a real server."""

import json
import signal
import sys

import pytest

from llmq.cli import quickstart
from llmq.cli.main import main


@pytest.fixture
def cache(tiny_llama, tmp_path, monkeypatch):
    """A fresh cache; quickstart works on the tiny model, with less text."""
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path))
    monkeypatch.setattr(quickstart, "MODEL", "tiny")
    monkeypatch.setattr("llmq.profiles.checkpoint.find_model", lambda *_, **__: tiny_llama())
    smaller = {
        "WINDOW": 64,
        "NUM_WINDOWS": 2,
        "CALIBRATION_SAMPLES": 2,
        "CALIBRATION_TOKENS": 64,
        "MAX_ANSWER_TOKENS": 8,
    }
    for name, value in smaller.items():
        monkeypatch.setattr(quickstart, name, value)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["llmq", "quickstart", "--threads", "1", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        assert not exit_info.value.code
        return capsys.readouterr()

    return call


def test_the_loop_and_a_second_run_that_reuses_what_the_first_made(cache, run):
    first = json.loads(run("--json").out)
    assert first["budget"]["sequences"]["4-bit"] >= first["budget"]["sequences"]["bf16"] > 0
    assert first["quantize"]["bytes_after"] < first["quantize"]["bytes_before"]
    proof = first["proof"]["text"]["divergence"]
    assert proof["mean_kl"] > 0
    assert proof["num_positions"] == 126
    assert first["chat"]["num_tokens"] >= 1
    assert [first[step]["reused"] for step in ("quantize", "proof")] == [False, False]

    second = run()
    assert "Reused from an earlier run" in second.out
    assert "measured by an earlier run" in second.out
    assert f"{proof['candidate']['token_ppl']:.3f}" in second.out
    for word in ("budget", "quantize", "prove", "serve", "next"):
        assert word in second.out


def test_an_interruption_while_quantizing_leaves_nothing_half_made(cache, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("llmq.quantize.pipeline.verify_folder", interrupted)
    monkeypatch.setattr(sys, "argv", ["llmq", "quickstart"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 130
    assert [path.name for path in (cache / "quickstart").iterdir() if path.is_dir() and path.suffix != ".work"] == []


def test_a_proof_of_other_checkpoints_or_another_amount_of_text_is_not_reused(tmp_path):
    saved, identity = tmp_path / "proof.json", {"original": "a", "quantized": "b"}
    measured = {"window": quickstart.WINDOW, "num_windows": quickstart.NUM_WINDOWS}
    saved.write_text(json.dumps({"identity": identity, "text": {"perplexity": measured}}))
    assert quickstart._read_proof(saved, identity) is not None
    assert quickstart._read_proof(saved, {**identity, "quantized": "c"}) is None
    saved.write_text(json.dumps({"identity": identity, "text": {"perplexity": {**measured, "num_windows": 1}}}))
    assert quickstart._read_proof(saved, identity) is None
    saved.write_text("{")
    assert quickstart._read_proof(saved, identity) is None
