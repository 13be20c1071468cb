"""EngineLM over a toy distribution, and against lm-eval's own hf backend on a tiny model."""

import json
import shutil

import pytest
from lm_eval.api.instance import Instance

from llmq.evals.harness import EngineLM
from llmq.evals.request_order import leaders_first
from llmq.profiles.errors import InputError
from llmq.runtime.frontend.tokenizer import Tokenizer


def item(kind: str, *arguments, doc_id: int = 0) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("task", doc_id, 1))


@pytest.fixture(scope="module")
def tokenizer(tiny_llama) -> Tokenizer:
    return Tokenizer.from_folder(tiny_llama())


@pytest.fixture
def toy_lm(toy_engine, tokenizer) -> EngineLM:
    return EngineLM(toy_engine(512, eos=[2]), tokenizer)


def test_a_likelihood_is_the_sum_over_the_continuation_and_greedy_where_it_is_the_argmax(toy_lm, tokenizer):
    engine = toy_lm._engine
    context, continuation = "the value of", " the expression"
    ids, continuation_ids = tokenizer.encode(context + continuation), tokenizer.encode(continuation)
    assert ids == tokenizer.encode(context) + continuation_ids
    greedy = tokenizer.decode([int(engine.table[tokenizer.encode(context)[-1]].argmax())])
    scored, best = toy_lm.loglikelihood([item("loglikelihood", context, c) for c in (continuation, greedy)])
    n = len(continuation_ids)
    expected = sum(float(engine.log_probs[a, b]) for a, b in zip(ids[-n - 1 : -1], ids[-n:], strict=True))
    assert scored == (pytest.approx(expected, rel=1e-5), False)
    assert best[1] is True


def test_a_continuation_that_merges_into_the_context_is_encoded_apart_and_counted(toy_lm, tokenizer):
    """C14: "th" + "e" is one token, so that nothing would be left to score."""
    assert len(tokenizer.encode("the")) == 1
    (logprob, _), _ = toy_lm.loglikelihood([item("loglikelihood", "th", "e"), item("loglikelihood", "a", " b")])
    last, only = tokenizer.encode("th")[-1], tokenizer.encode("e")[0]
    assert logprob == pytest.approx(float(toy_lm._engine.log_probs[last, only]))
    assert toy_lm.counts.num_encoded_apart == 1


def test_an_empty_context_is_conditioned_on_bos_and_an_empty_continuation_is_refused(toy_lm, tokenizer):
    toy_lm.loglikelihood([item("loglikelihood", "", "value")])
    assert toy_lm.first_token_ids == [tokenizer.bos_token_id, *tokenizer.encode("value")]
    with pytest.raises(InputError, match="task task, item 7: nothing to score"):
        toy_lm.loglikelihood([item("loglikelihood", "a", "", doc_id=7)])


def test_context_too_long_for_the_model_is_cut_from_the_left_and_counted(toy_engine, tokenizer):
    lm = EngineLM(toy_engine(512, max_model_len=32), tokenizer)
    lm.loglikelihood([item("loglikelihood", "value " * 50, " of")])
    assert len(lm._engine.seen[0].prompt_token_ids) == 32
    assert lm.counts.num_truncated == 1
    lm.generate_until([item("generate_until", "value " * 50, {"until": [], "max_gen_toks": 10})])
    assert len(lm._engine.seen[1].prompt_token_ids) == 21
    assert lm.counts.num_truncated == 2
    with pytest.raises(InputError, match="max_gen_toks 31 leaves no room"):
        lm.generate_until([item("generate_until", "value", {"max_gen_toks": 31})])


def test_every_generation_runs_under_its_own_options(toy_lm):
    """E14: the options of one request never decide another's."""
    options = [
        {"until": [], "max_gen_toks": 3},
        {"until": ["<|im_start|>"], "max_new_tokens": 4},
        {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 4},
    ]
    toy_lm.generate_until([item("generate_until", "the", o) for o in options])
    params = {r.request_id: r.sampling_params for r in toy_lm._engine.seen}
    assert [params[str(i)].max_tokens for i in range(3)] == [3, 4, 5]
    assert [params[str(i)].temperature for i in range(3)] == [0.0, 0.0, 0.7]
    assert [1 in params[str(i)].stop_token_ids for i in range(3)] == [False, True, False]
    assert (params["2"].top_p, params["2"].seed) == (0.9, 4)


def test_an_option_that_is_not_honoured_is_refused(toy_lm):
    with pytest.raises(InputError, match=r"not honoured by llmq: typical_p=0\.9"):
        toy_lm.generate_until([item("generate_until", "the", {"max_gen_toks": 3, "typical_p": 0.9})])
    with pytest.raises(InputError, match="item 3: temperature"):
        toy_lm.generate_until([item("generate_until", "the", {"max_gen_toks": 3, "temperature": 9.0}, doc_id=3)])


def test_a_stop_string_cuts_the_text_and_ends_the_request(toy_lm, tokenizer):
    (text,) = toy_lm.generate_until([item("generate_until", "the", {"until": [], "max_gen_toks": 20})])
    middle = text[len(text) // 2 :][:3]
    (cut,) = toy_lm.generate_until([item("generate_until", "the", {"until": [middle], "max_gen_toks": 20})])
    assert cut == text.split(middle)[0]
    assert not toy_lm._engine.requests
    assert (toy_lm.counts.num_hit_cap, toy_lm.counts.num_generations) == (1, 2)


def test_chat_has_exactly_the_template_s_bos_and_text_in_a_message_forges_no_turn(toy_lm, tokenizer):
    """C12: no second BOS in front of the template's."""
    messages = [{"role": "user", "content": "hi <|im_end|> there"}]
    text = toy_lm.apply_chat_template(messages)
    toy_lm.generate_until([item("generate_until", text, {"until": [], "max_gen_toks": 1})])
    ids = toy_lm._engine.seen[0].prompt_token_ids
    assert ids == tokenizer.encode_chat(messages)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1] != tokenizer.bos_token_id
    assert ids.count(2) == 1
    toy_lm.loglikelihood([item("loglikelihood", text, "yes")])
    assert toy_lm._engine.seen[1].prompt_token_ids[: len(ids)] == ids


def test_a_conversation_can_be_left_open_in_its_last_message(toy_lm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is "}]
    text = toy_lm.apply_chat_template(messages, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is "


def test_one_request_of_each_context_goes_first_so_that_the_others_hit_its_blocks():
    contexts = [(1,), (2,), (1,), (2,), (1,), (3,)]
    assert leaders_first(contexts) == [0, 1, 5, 2, 4, 3]
    assert sorted(leaders_first([(i % 7,) for i in range(200)], group_size=3)) == list(range(200))


BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
}


@pytest.fixture(scope="module", params=["adds no BOS", "adds a BOS"])
def backends(request, tiny_llama, tmp_path_factory):
    """lm-eval's hf backend and ours on the same tiny model, in float32, with both kinds of tokenizer."""
    from lm_eval.models.huggingface import HFLM

    from llmq.runtime.config import EngineConfig
    from llmq.runtime.engine import Engine

    folder = tiny_llama()
    if request.param == "adds a BOS":
        folder = shutil.copytree(folder, tmp_path_factory.mktemp("bos") / "tiny")
        content = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": BOS_FIRST}))
    config = EngineConfig(model=str(folder), dtype="fp32", device="cpu", kv_cache_memory_bytes=8 << 20, threads=1)
    engine = Engine.from_config(config)
    ours = EngineLM(engine, Tokenizer.from_folder(folder))
    assert ours.tok_encode("value")[:1] == (
        [1] if request.param == "adds a BOS" else ours.tok_encode("value", False)[:1]
    )
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4, max_length=ours.max_length)
    return ours, theirs


WORDS = ["the", "value", "of", "an", "expression", "is", "not", "defined", "class", "object", "return", "import"]


def sentence(seed: int, length: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * i + 3 * i * seed) % len(WORDS)] for i in range(length))


def test_likelihoods_equal_the_hf_backend_s_item_by_item(backends):
    ours, theirs = backends
    pairs = [(sentence(i, 3 + i), f" {sentence(i + j, 1 + j)}") for i in range(8) for j in range(3)]
    pairs += [("", "value"), ("value \n", " of"), (sentence(3, 400), " the class")]
    requests = [item("loglikelihood", *pair, doc_id=i) for i, pair in enumerate(pairs)]
    mine, reference = ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True)
    assert [logprob for logprob, _ in mine] == pytest.approx([logprob for logprob, _ in reference], abs=2e-3, rel=1e-4)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in reference]
    stats = ours._engine.stats()
    assert stats.prefix_cache_hits > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_rolling_likelihoods_equal_the_hf_backend_s(backends):
    ours, theirs = backends
    texts = [sentence(1, 20), sentence(2, 300), sentence(5, 700), "x"]  # one, two and several windows
    requests = [item("loglikelihood_rolling", text) for text in texts]
    reference = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(reference, rel=1e-5)


def test_generations_equal_the_hf_backend_s(backends):
    ours, theirs = backends
    options = [{"until": ["\n"], "max_gen_toks": 24}, {"until": ["e", " of"], "max_gen_toks": 16, "do_sample": False}]
    arguments = [(sentence(i, 2 + 3 * i), dict(options[i % 2])) for i in range(10)]
    arguments.append((ours.apply_chat_template([{"role": "user", "content": "hi"}]), {"until": [], "max_gen_toks": 12}))
    mine = ours.generate_until([item("generate_until", *a) for a in arguments])
    reference = theirs.generate_until([item("generate_until", *a) for a in arguments], disable_tqdm=True)
    # A character that max_gen_toks cuts is no text of ours, and a replacement character of the hf backend's.
    assert [text.rstrip("\ufffd") for text in mine] == [text.rstrip("\ufffd") for text in reference]
