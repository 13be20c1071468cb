"""A real model: perplexity against transformers, the ids that go to it here and through a server, and kill -9."""

import json
import math
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from served import LLMQ, ONE_THREAD, Served

from llmq.evals.evaluation import Subject, evaluate_text, plan_text
from llmq.evals.harness import EngineLM
from llmq.evals.numerics import Numerics

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def subject(smollm2) -> Subject:
    return Subject.open(smollm2, Numerics(dtype="fp32"), max_model_len=256, max_num_seqs=4)


def test_two_windows_of_wikitext_equal_transformers_to_a_thousandth(smollm2, subject, shared):
    from transformers import AutoModelForCausalLM

    text = (shared / "data/text/wikitext2-raw.test.txt").read_text()[:60_000]
    encoded, plan = plan_text(subject.tokenizer, text, "wikitext", window=256, max_windows=2)
    measured = evaluate_text(subject, encoded, plan).perplexity
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids, nll = torch.tensor(encoded.token_ids), 0.0
    for begin in (0, 256):
        window = ids[None, begin : begin + 256]
        with torch.no_grad():
            nll += torch.nn.functional.cross_entropy(
                model(window).logits[0, :-1], window[0, 1:], reduction="sum"
            ).item()
    assert measured.num_scored == 510
    assert measured.token_ppl == pytest.approx(math.exp(nll / 510), rel=1e-3)


def test_joins_and_chat_ids_of_the_real_tokenizer(subject):
    """C12 and C14 on the ids that the cases name."""
    lm = EngineLM(subject.engine, subject.tokenizer)
    assert lm.encoder.pair("Ans", "wer") == (subject.tokenizer.encode("Ans"), [5830])
    assert lm.counts.num_encoded_apart == 1
    ids = lm.encoder.prompt(lm.apply_chat_template([{"role": "user", "content": "Hi"}]))
    assert (ids[:4], len(ids)) == ([1, 9690, 198, 2683], 31)
    assert subject.tokenizer.encode("Hi")[0] != 1


def llmq_eval(model: object, *options: object) -> subprocess.CompletedProcess:
    command = [LLMQ, "eval", str(model), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def samples(saved: Path) -> list[dict]:
    return [json.loads(line) for line in saved.with_name(f"{saved.stem}.samples.jsonl").read_text().splitlines()[1:]]


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    cities = ["France", "Italy", "Spain", "Japan", "Egypt"]
    lines = [{"prompt": f"The capital of {city} is", "answer": "x", "max_tokens": 4} for city in cities]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_logged_ids_have_the_template_s_one_bos_or_none_here_and_through_a_server(smollm2, questions, tmp_path):
    """C12."""
    server = Served(smollm2, "--dtype", "fp32", "--max-model-len", "512")
    for options, begins in ((["--apply-chat-template"], [1, 9690, 198]), ([], [504, 3575, 282])):
        here, there = tmp_path / "here.json", tmp_path / "there.json"
        llmq_eval(smollm2, "--data", questions, *options, "--dtype", "fp32", *ONE_THREAD, "-o", here)
        llmq_eval(server.url, "--data", questions, *options, "-o", there)
        ours, theirs = samples(here), samples(there)
        for sample in ours:
            assert sample["prompt_token_ids"][:3] == begins
            assert 1 not in sample["prompt_token_ids"][1:2]
        for name in ("prompt", "prompt_token_ids", "answers", "scores"):
            assert [sample[name] for sample in theirs] == [sample[name] for sample in ours]
    assert server.stop() == 0


def test_a_continuation_that_merges_into_its_context_is_scored_alone(subject):
    """C14: "Ans" + "wer" is one token of SmolLM2."""
    from lm_eval.api.instance import Instance

    lm = EngineLM(subject.engine, subject.tokenizer)
    item = Instance(request_type="loglikelihood", doc={}, arguments=("Ans", "wer"), idx=0, metadata=("task", 0, 1))
    ((logprob, _),) = lm.loglikelihood([item])
    assert -50 < logprob < 0
    assert lm.prompt_token_ids["Ans", "wer"][-1] == 5830
    assert lm.counts.num_encoded_apart == 1


def test_a_killed_run_of_40_items_goes_on(smollm2, tmp_path):
    """C15."""
    data, saved, whole = tmp_path / "mine.jsonl", tmp_path / "r.json", tmp_path / "whole.json"
    colours = ["red", "blue", "green", "white"]
    items = [
        {"query": f"Item {i}: the sky is {colours[i % 4]} and the sea is", "choices": colours, "gold": i % 4}
        for i in range(40)
    ]
    data.write_text("\n".join(map(json.dumps, items)))
    options = ["--data", str(data), "--dtype", "fp32", *ONE_THREAD]
    log = tmp_path / "r.model.answers.jsonl"
    running = subprocess.Popen([LLMQ, "eval", smollm2, *options, "-o", saved], stderr=subprocess.DEVNULL)
    try:
        while not log.exists() or log.read_bytes().count(b"\n") < 61:  # 15 items of 4 choices, and the first line
            assert running.poll() is None
            time.sleep(0.02)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    num_kept = log.read_bytes().count(b"\n") - 1
    assert 60 <= num_kept < 160
    done = llmq_eval(smollm2, *options, "-o", saved)
    assert f"{num_kept} answers of an earlier run" in done.stderr
    llmq_eval(smollm2, *options, "-o", whole)
    content, undisturbed = (json.loads(path.read_text())["tasks"] for path in (saved, whole))
    assert content["scores"] == undisturbed["scores"]
    assert {score["num_items"] for score in content["scores"]} == {40}
    assert len(samples(saved)) == 40
