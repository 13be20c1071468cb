"""Speculation on SmolLM2: a server that guesses answers as one that does not, on torch and on native kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_driver import greedy, run_all
from served import Served

from llmq.runtime.config import EngineConfig, Speculation
from llmq.runtime.engine import Engine
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.kernels import native, why_absent

pytestmark = pytest.mark.system

SHORT = ("--device", "cpu", "--max-model-len", "512", "--kv-cache-memory", "64MiB")
ALPHABET = "Here is the English alphabet: ABC"
LIST = "Numbers, one a line:\n1: one\n2: two\n3: three\n1: one\n2: two\n3: three\n1: one\n"
NGRAM = Speculation(method="ngram", num_tokens=4)


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Engine:
    return Engine.from_config(EngineConfig(model=str(smollm2), dtype="fp32", max_model_len=512))


@pytest.fixture(scope="module", params=["ngram", "a copy in 4 bits"])
def server(request, smollm2: Path) -> Iterator[Served]:
    how = ("ngram",) if request.param == "ngram" else ("draft", "--draft-quant", "w4", "--num-speculative-tokens", "3")
    served = Served(smollm2, *SHORT, "--dtype", "float32", "--speculative", *how)
    yield served
    assert served.stop() == 0
    assert "Traceback" not in served.stderr


def test_texts_and_reasons_are_those_without(server: Served, plain: Engine, smollm2: Path):
    tokenizer = Tokenizer.from_folder(smollm2)
    for prompt in (ALPHABET, LIST):
        ids = tokenizer.encode(prompt)
        expected = tokenizer.decode(run_all(plain, [ids], greedy(48))[0].token_ids)
        choice = server.complete(prompt=prompt, temperature=0, max_tokens=48, ignore_eos=True)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "length")
    drafted, accepted = (server.metric(f"llmq_{name}_tokens_total") for name in ("draft", "accepted_draft"))
    assert 0.2 * drafted < accepted <= drafted


def test_a_stop_string_among_accepted_tokens_cuts_the_text(server: Served):
    wanted = {"prompt": LIST, "temperature": 0, "max_tokens": 48}
    whole = server.complete(**wanted)["choices"][0]["text"]
    stop = whole[10:14]
    stopped = server.complete(**wanted, stop=[stop])["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole[: whole.index(stop)]


@pytest.mark.skipif(native is None, reason=why_absent)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_native_kernels_give_the_same_tokens_behind_drafts(smollm2: Path, kv_dtype):
    tokenizer = Tokenizer.from_folder(smollm2)
    prompts = [tokenizer.encode(text) for text in (ALPHABET, LIST, f"{LIST}2: two\n", "The capital of France is")]

    def run(speculation: Speculation | None) -> tuple[list[list[int]], Engine]:
        config = EngineConfig(
            model=str(smollm2), dtype="bf16", kv_dtype=kv_dtype, max_model_len=512, speculation=speculation
        )
        engine = Engine.from_config(config)
        return [one.token_ids for one in run_all(engine, prompts, greedy(64))], engine

    expected, engine = run(None)
    assert engine.info.fingerprint["program"] == "native"
    made, engine = run(NGRAM)
    assert made == expected
    assert engine.stats().accepted_draft_tokens > 0.3 * engine.stats().draft_tokens
    made, engine = run(Speculation(method="draft", num_tokens=3, draft_model=str(smollm2)))
    assert made == expected
    assert engine.stats().accepted_draft_tokens == engine.stats().draft_tokens > 0
