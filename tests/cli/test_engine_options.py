"""What serve and batch take alike: read before the model is looked for, which may be a download of hours."""

import json

import pytest
from typer.testing import CliRunner

from llmq.cli import batch, serve
from llmq.profiles import checkpoint
from llmq.profiles.errors import InputError


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "int3"], "--dtype int3: one of auto, bf16"),
        (["--kv-dtype", "int3"], "--kv-dtype int3: one of auto, bf16"),
        (["--device", "tpu"], "--device tpu: one of auto, cpu, cuda"),
        (["--kernels", "blas"], "--kernels blas: one of auto, torch, native"),
        (["--head", "int4"], "--head int4: one of auto, 16bit, int8"),
        (["--activations", "fp8"], "--activations fp8: one of auto, exact, int8"),
        (["--max-model-len", "long"], "--max-model-len: 'long' is no number of tokens"),
        (["--kv-cache-memory", "64M"], "'64M' is no size"),
    ],
)
@pytest.mark.parametrize("verb", ["serve", "batch"])
def test_a_mistyped_option_is_refused_before_the_model_is_looked_for(monkeypatch, tmp_path, verb, flags, message):
    monkeypatch.setattr(checkpoint, "find_model", lambda *_, **__: pytest.fail("looked for the model"))
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}))
    app, args = (serve.app, ["org/m"]) if verb == "serve" else (batch.app, [str(file), "-o", str(tmp_path / "out")])
    with pytest.raises(InputError) as raised:
        CliRunner().invoke(app, [*args, *flags], catch_exceptions=False)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("ttft", "'ttft' is no limit; write ttft=500ms,tpot=50ms@p99"),
        ("tpot=50", "'tpot=50' is no limit"),
        ("tpot=50ms@p0", "'@p0' is no share"),
        ("ttft=1s,e2e=9s", "e2e depends on how long an answer is"),
    ],
)
def test_a_promise_that_is_none_is_refused_before_the_model_is_looked_for(monkeypatch, slo, message):
    monkeypatch.setattr(checkpoint, "find_model", lambda *_, **__: pytest.fail("looked for the model"))
    with pytest.raises(InputError) as raised:
        CliRunner().invoke(serve.app, ["org/m", "--slo", slo], catch_exceptions=False)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-layers", "4"], "--draft-layers 4: nothing is guessed without --speculative"),
        (["--speculative", "ngram", "--draft-layers", "4"], "--draft-layers 4: --speculative ngram takes no drafter"),
        (
            ["--speculative", "draft", "--draft-layers", "4", "--draft-quant", "w4"],
            "--draft-quant and --draft-layers exclude each other",
        ),
        (
            ["--speculative", "ngram", "--speculative-pool", "lots"],
            "--speculative-pool: 'lots' is no number of tokens",
        ),
        (["--speculative-pool", "64k"], "--speculative-pool 64k: nothing is guessed without --speculative"),
        (
            ["--speculative", "auto", "--draft-layers", "4", "--speculative-pool", "64k"],
            "--speculative-pool 64k: n-grams are found in it",
        ),
    ],
)
def test_what_does_not_guess_together_is_refused(monkeypatch, flags, message):
    monkeypatch.setattr(checkpoint, "find_model", lambda *_, **__: pytest.fail("looked for the model"))
    with pytest.raises(InputError) as raised:
        CliRunner().invoke(serve.app, ["org/m", *flags], catch_exceptions=False)
    assert message in str(raised.value)


def test_drafters_are_read_as_the_engine_takes_them():
    from llmq.cli import engine_options
    from llmq.runtime.config import Speculation

    assert engine_options.speculation("draft", None, None, None, 6) == Speculation(method="draft", draft_layers=6)
    pooled = engine_options.speculation("auto", None, None, None, None, "64k")
    assert pooled == Speculation(method="ngram", num_tokens=8, adaptive=True, pool_tokens=65536)
