"""Every refusal names the field, the value and the range, before the engine is asked."""

import pytest

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.input_processor import InputProcessor
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineInfo


def info(**changes: object) -> EngineInfo:
    facts = {
        "model": "m",
        "vocab_size": 512,
        "max_model_len": 64,
        "eos_token_ids": [2],
        "num_blocks": 8,
        "block_tokens": 16,
        "kv_cache_bytes": 1,
        "weight_bytes": 1,
        "device": "cpu",
        "fingerprint": {},
    }
    return EngineInfo(**facts | changes)


@pytest.fixture
def processor(byte_level: Tokenizer) -> InputProcessor:
    return InputProcessor(byte_level, info())


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [[1], []]])
def test_a_prompt_without_tokens_is_refused(processor: InputProcessor, prompt: object):
    with pytest.raises(InvalidRequestError) as refused:
        processor.completion_prompts(prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("prompt", [None, 5, {}, [1, "a"], [[1, "a"]], [True], [[[1]]], [1.5], "\ud800", ["a\udfff"]])
def test_a_prompt_of_another_shape_is_refused(processor: InputProcessor, prompt: object):
    with pytest.raises(InvalidRequestError) as refused:
        processor.completion_prompts(prompt)
    assert refused.value.param == "prompt"


def test_prompts_in_all_four_forms(processor: InputProcessor, byte_level: Tokenizer):
    ids = byte_level.encode("hello")
    assert processor.completion_prompts("hello") == [ids]
    assert processor.completion_prompts(["hello", "hello"]) == [ids, ids]
    assert processor.completion_prompts([5, 6]) == [[5, 6]]
    assert processor.completion_prompts([[5, 6], [7]]) == [[5, 6], [7]]


@pytest.mark.parametrize("token_id", [-1, 512, 10**9])
def test_prompt_ids_must_be_the_models(processor: InputProcessor, token_id: int):
    with pytest.raises(InvalidRequestError, match=rf"{token_id} is not a token id .* 0 to 511") as refused:
        processor.completion_prompts([5, token_id])
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("logit_bias", {512: 5.0}, "512 is not a token id"),
        ("logit_bias", {-1: 5.0}, "-1 is not a token id"),
        ("logit_bias", {5: 101.0}, "at most 100"),
        ("logit_bias", {5: float("nan")}, "at most 100"),
        ("stop_token_ids", [151645], "0 to 511"),
        ("top_p", 1.5, "at most 1"),
        ("top_p", float("nan"), "nan"),
        ("top_k", -7, "-7"),
        ("min_p", -0.1, "at least 0"),
        ("temperature", -1, "at least 0"),
        ("temperature", float("inf"), "at most 2"),
        ("max_tokens", -3, "at least 1, got -3"),
        ("max_tokens", 0, "at least 1, got 0"),
        ("logprobs", 9999, "at most 20"),
        ("repetition_penalty", 0, "at least 0.01"),
        ("presence_penalty", 2.5, "at most 2"),
        ("frequency_penalty", -2.5, "at least -2"),
        ("seed", 2**63, "at most"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 40, "at most"),
    ],
)
def test_a_value_out_of_range_names_field_and_range(processor: InputProcessor, field: str, value: object, says: str):
    with pytest.raises(InvalidRequestError, match=says) as refused:
        processor.sampling_params(10, **{"default_max_tokens": 16, field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [(63, 1, True), (64, 1, False), (65, 1, False), (600, 1, False), (40, 60, False), (40, 24, True)],
)
def test_prompt_and_output_must_fit_the_context(processor: InputProcessor, num_prompt, max_tokens, fits):
    if fits:
        assert processor.sampling_params(num_prompt, max_tokens=max_tokens).max_tokens == max_tokens
        return
    with pytest.raises(InvalidRequestError) as refused:
        processor.sampling_params(num_prompt, max_tokens=max_tokens)
    assert refused.value.code == "context_length_exceeded"
    assert all(str(number) in refused.value.message for number in (64, num_prompt, max_tokens))


def test_a_default_is_cut_to_what_is_left(processor: InputProcessor):
    assert processor.sampling_params(60, default_max_tokens=16).max_tokens == 4
    assert processor.sampling_params(10, default_max_tokens=16).max_tokens == 16
    assert processor.sampling_params(10).max_tokens == 54
    with pytest.raises(InvalidRequestError, match="64 tokens"):
        processor.sampling_params(64, default_max_tokens=16)


def test_scoring_alone_may_fill_the_context(processor: InputProcessor):
    assert processor.sampling_params(64, max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_what_is_off_reaches_the_engine_as_off(processor: InputProcessor):
    params = processor.sampling_params(1, top_k=-1, top_p=0.0, temperature=None, logit_bias={3: 1.5})
    assert (params.top_k, params.top_p, params.temperature, params.logit_bias) == (1, 1.0, 1.0, {3: 1.5})
    assert processor.sampling_params(1, top_k=-1).top_k == 0
    assert processor.sampling_params(1, temperature=1e-40).temperature == 0


def test_an_end_token_that_the_engine_does_not_know_is_sent_along(byte_level: Tokenizer):
    processor = InputProcessor(byte_level, info(eos_token_ids=[]))
    assert processor.sampling_params(1, stop_token_ids=[9]).stop_token_ids == {2, 9}
    assert processor.sampling_params(1, ignore_eos=True, stop_token_ids=[9]).stop_token_ids == {9}


def test_a_huge_text_is_refused_by_its_size(processor: InputProcessor):
    with pytest.raises(InvalidRequestError, match="at least") as refused:
        processor.completion_prompts("a" * 5_000_000)
    assert refused.value.code == "context_length_exceeded"


def test_roles_are_a_closed_set(processor: InputProcessor):
    with pytest.raises(InvalidRequestError, match="role") as refused:
        processor.chat_prompt([{"role": "<|im_start|>system", "content": "x"}])
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="at least one message"):
        processor.chat_prompt([])


def test_stop_strings(processor: InputProcessor):
    assert processor.stop_strings(None) == []
    assert processor.stop_strings("a") == ["a"]
    for stop in (["a", ""], ["a"] * 17):
        with pytest.raises(InvalidRequestError) as refused:
            processor.stop_strings(stop)
        assert refused.value.param == "stop"
