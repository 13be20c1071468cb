"""Perplexity of a real model on real text, against transformers; and the joins of a real tokenizer."""

import math

import pytest
import torch

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
    assert lm._encode_pair("Ans", "wer") == (subject.tokenizer.encode("Ans"), [5830])
    assert lm.counts.num_encoded_apart == 1
    ids = lm._chat_ids[lm.apply_chat_template([{"role": "user", "content": "Hi"}])]
    assert (ids[:4], len(ids)) == ([1, 9690, 198, 2683], 31)
    assert subject.tokenizer.encode("Hi")[0] != 1
