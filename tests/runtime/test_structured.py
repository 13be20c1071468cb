"""Structured output: what a random model writes follows its grammar, alone, among others, after a preemption."""

import json
import re

import jsonschema
import msgspec
import pytest
from engine_driver import Collected, force_preemption, greedy, run_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmq.runtime.frontend.chat_parser import ChatParser
from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.grammar import GrammarCompiler, json_grammar
from llmq.runtime.frontend.grammar_source import grammar_of_source
from llmq.runtime.frontend.structured import grammar_of_response_format, grammar_of_structured_outputs
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.frontend.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

PROMPT = [5, 9, 13]
# What always ends soon, for a random model goes on as long as it may.
_LEAF = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-50, 50),
        st.integers(0, 60),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.lists(st.sampled_from(["red", "grün", 'say "hi"', 7, None, True]), min_size=1, max_size=4, unique=True).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
)


def _branches(inner):
    properties = st.dictionaries(st.sampled_from(["a", "b", "name", "größe"]), inner, max_size=3)
    return st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(
            lambda fields, required: {
                "type": "object",
                "properties": fields,
                "required": [name for name in fields if name in required],
                "additionalProperties": False,
            },
            properties,
            st.sets(st.sampled_from(["a", "b", "name", "größe"])),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    )


SCHEMAS = st.recursive(_LEAF, _branches, max_leaves=5)


@pytest.fixture(scope="module")
def structured_folder(tmp_path_factory, tiny_tokenizer_json):
    from tiny_model import save_tiny_model

    folder = save_tiny_model(tmp_path_factory.mktemp("structured"), "llama", max_position_embeddings=1024)
    (folder / "tokenizer.json").write_bytes(tiny_tokenizer_json.read_bytes())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return folder


@pytest.fixture(scope="module")
def tokenizer(structured_folder) -> Tokenizer:
    return Tokenizer.from_folder(structured_folder)


@pytest.fixture(scope="module")
def engine(structured_folder):
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.engine import Engine

    return Engine.from_config(
        EngineConfig(model=str(structured_folder), dtype="fp32", device="cpu", threads=1, check_integrity=True)
    )


def written(tokenizer: Tokenizer, collected) -> str:
    assert collected.finish_reason == "stop", collected
    return tokenizer.decode(collected.token_ids)


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_json_always_validates_and_neighbours_do_not_notice(engine, tokenizer, schema: dict, seed: int):
    try:
        GrammarCompiler(tokenizer, 512, [2]).check(json_grammar(schema), "schema")
    except InvalidRequestError as error:
        assert "Unsatisfiable" in error.message  # noqa: PT017
        return
    free = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
    bound = SamplingParams(seed=seed, max_tokens=900, grammar=json_grammar(schema))
    alone = run_all(engine, [PROMPT], free)[0]
    made, neighbour = run_all(engine, [PROMPT] * 2, [bound, free])
    jsonschema.validate(json.loads(written(tokenizer, made)), schema)
    assert neighbour.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"\d{3}-[xyz]{2,5}"}, r"\d{3}-[xyz]{2,5}"),
        ({"choice": ["yes", "no", 'per"haps\n']}, r'yes|no|per"haps\n'),
    ],
    ids=repr,
)
def test_regex_and_choice(engine, tokenizer, asked: dict, pattern: str):
    fields = dict.fromkeys(("json", "json_object", "regex", "choice", "grammar"))
    grammar = grammar_of_structured_outputs(fields | asked)
    params = [SamplingParams(temperature=2.0, seed=seed, max_tokens=60, grammar=grammar) for seed in range(12)]
    texts = [written(tokenizer, one) for one in run_all(engine, [PROMPT] * 12, params)]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(set(texts)) > 1


def test_json_object_is_an_object_and_text_is_free(engine, tokenizer):
    assert grammar_of_response_format({"type": "text"}) is None
    grammar = grammar_of_response_format({"type": "json_object"})
    brackets = {i: -8.0 for i in range(512) if tokenizer.token_bytes(i) in (b"[", b"{")}
    ends = {i: 12.0 for i in range(512) if tokenizer.token_bytes(i) in (b"}", b"]", b'"')}
    params = SamplingParams(seed=3, max_tokens=900, grammar=grammar, logit_bias=brackets | ends)
    assert isinstance(json.loads(written(tokenizer, run_all(engine, [PROMPT], params)[0])), dict)


STRINGS = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 9}, "minItems": 6, "maxItems": 8}
SUM = grammar_of_source('root ::= num ("+" num){3,9} "=" ws\nnum ::= [1-9] [0-9]{0,3} ws\nws ::= " "?')
AMBIGUOUS = grammar_of_source('start: ("zq" | "zk"){2} / +/ / +/ / +/')


def test_a_callers_grammar_is_followed_beside_a_hostile_one(engine, tokenizer):
    free = SamplingParams(seed=9, max_tokens=12, ignore_eos=True)
    bound = [SamplingParams(seed=seed, max_tokens=99, grammar=SUM, isolate_grammar=True) for seed in range(3)]
    expected = [one.token_ids for one in run_all(engine, [PROMPT] * 4, [*bound, free])]
    hostile = [SamplingParams(seed=seed, max_tokens=99, grammar=AMBIGUOUS, isolate_grammar=True) for seed in range(2)]
    made = run_all(engine, [PROMPT] * 6, [*hostile, *bound, free])
    for one in made[:2]:
        assert one.finish_reason == "error"
        assert "too much time" in one.error
        assert re.match("zq|zk", tokenizer.decode(one.token_ids))
    assert [one.token_ids for one in made[2:]] == expected
    for one in made[2:5]:
        assert re.fullmatch(r"[1-9]\d{0,3} ?(\+[1-9]\d{0,3} ?){3,9}= ?", written(tokenizer, one))


def test_forks_of_a_callers_grammar_follow_it_each(engine, tokenizer):
    params = SamplingParams(seed=1, temperature=2.0, max_tokens=99, grammar=SUM, isolate_grammar=True)
    engine.add_request(
        EngineRequest(request_id="a", prompt_token_ids=PROMPT, sampling_params=params, forks=[("b", 2), ("c", 3)])
    )
    texts = {name: Collected() for name in "abc"}
    while engine.has_unfinished_requests:
        for output in engine.step():
            texts[output.request_id].add(output)
    assert len({written(tokenizer, one) for one in texts.values()}) == 3
    for name, seed in (("b", 2), ("c", 3)):
        [alone] = run_all(engine, [PROMPT], msgspec.structs.replace(params, seed=seed))
        assert alone.token_ids == texts[name].token_ids


LONG_SUM = grammar_of_source('root ::= num ("+" num){30,60} "=" ws\nnum ::= [1-9] [0-9]{0,3} ws\nws ::= " "?')


@pytest.mark.parametrize("grammar", [json_grammar(STRINGS), LONG_SUM], ids=["json", "caller's"])
def test_preemption_changes_no_token(structured_folder, make_engine, grammar):
    isolated = grammar is LONG_SUM
    prompts = [[5 + i] * (20 + i) for i in range(5)]
    params = [SamplingParams(seed=i, max_tokens=200, grammar=grammar, isolate_grammar=isolated) for i in range(5)]
    roomy = make_engine(structured_folder)
    expected = [one.token_ids for one in run_all(roomy, prompts, params)]
    block_bytes = roomy.info.kv_cache_bytes // roomy.info.num_blocks
    tight = make_engine(structured_folder, kv_cache_memory_bytes=16 * block_bytes, max_model_len=250)
    force_preemption(tight)
    assert [one.token_ids for one in run_all(tight, prompts, params)] == expected
    assert tight.stats().num_preemptions > 0


# llguidance 1.9.1 panics where the words of an error would be cut inside a character.
PANICS = {"maxProperties": {"a": "x" * 90 + "é" * 20}}


def test_a_panic_is_an_error_of_the_request(engine, tokenizer):
    with pytest.raises(InvalidRequestError):
        GrammarCompiler(tokenizer, 512, [2]).check(json_grammar(PANICS), "schema")
    made = run_all(engine, [PROMPT, PROMPT], [SamplingParams(seed=1, grammar=json_grammar(PANICS)), greedy(5)])
    assert made[0].finish_reason == "error"
    assert len(made[1].token_ids) == 5


def test_a_grammar_that_cannot_be_read_ends_its_request_only(engine):
    broken = SamplingParams(seed=1, max_tokens=5, grammar='{"grammars": [{"json_schema": {"type": "objct"}}]}')
    made = run_all(engine, [PROMPT, PROMPT], [broken, greedy(5)])
    assert "Invalid type: objct" in made[0].error
    assert len(made[1].token_ids) == 5


@pytest.mark.parametrize("tools", [HERMES, MISTRAL, LLAMA3], ids=lambda one: one.name)
def test_a_forced_call_is_one_that_its_format_reads(engine, tokenizer, tools: ToolFormat):
    colours = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    functions = [{"name": "paint", "parameters": colours | {"additionalProperties": False}}, {"name": "stop"}]
    for several in (False, True):
        grammar = tools.forced_grammar(functions, None, several=several)
        params = [SamplingParams(temperature=2.0, seed=seed, max_tokens=900, grammar=grammar) for seed in range(3)]
        for made in run_all(engine, [PROMPT] * 3, params):
            parsed = ChatParser(tools, reasons=False).push(written(tokenizer, made), final=True)
            assert parsed.content == ""
            assert parsed.tool_calls
            assert several or len(parsed.tool_calls) == 1
            for call in parsed.tool_calls:
                jsonschema.validate(
                    json.loads(call.arguments), colours if call.name == "paint" else {"maxProperties": 0}
                )
