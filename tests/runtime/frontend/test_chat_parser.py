"""Reasoning, content and tool calls out of text, however it is cut; formats recognized by templates."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.runtime.frontend.chat_parser import ChatDelta, ChatParser, ends_in_reasoning, model_reasons
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.frontend.tool_formats import HERMES, LLAMA3, MISTRAL, tool_format

CALL = '{"name": "f", "arguments": {"x": "é <tool"}}'


def parse(parser: ChatParser, pieces: list[str]) -> ChatDelta:
    whole = ChatDelta()
    for index, piece in enumerate(pieces):
        delta = parser.push(piece, final=index == len(pieces) - 1)
        whole.reasoning += delta.reasoning
        whole.content += delta.content
        whole.tool_calls += delta.tool_calls
    return whole


CASES = [
    (None, False, " plain <think>x</think> <tool_call>\n", "", " plain <think>x</think> <tool_call>\n", []),
    (None, True, "\n<think>\nwhy <b> not\n</think>\n\n  Because.", "why <b> not", "Because.", []),
    (None, True, "<think>cut off\n", "cut off", "", []),
    (None, True, " <thing> is no thought", "", " <thing> is no thought", []),
    (None, True, "late <think>x</think>", "", "late <think>x</think>", []),
    (HERMES, False, f"<tool_call>\n{CALL}\n</tool_call>", "", "", ["f"]),
    (
        HERMES,
        False,
        f"Let me.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n",
        "",
        "Let me.",
        ["f", "f"],
    ),
    (HERMES, True, f"<think>a</think>\n\nb\n<tool_call>{CALL}</tool_call>", "a", "b", ["f"]),
    (HERMES, False, "<tool_call>not JSON</tool_call> and on", "", "<tool_call>not JSON</tool_call> and on", []),
    (HERMES, False, f"<tool_call>{CALL}", "", "", ["f"]),
    (HERMES, False, "<tool_call>\n{", "", "<tool_call>\n{", []),
    (HERMES, False, "no call <tool_cal", "", "no call <tool_cal", []),
    (HERMES, False, '<tool_call>{"name": 5}</tool_call>', "", '<tool_call>{"name": 5}</tool_call>', []),
    (MISTRAL, False, f"Hm. [TOOL_CALLS] [{CALL}, {CALL}]", "", "Hm.", ["f", "f"]),
    (LLAMA3, False, '{"name": "g", "parameters": {"x": 1}}', "", "", ["g"]),
    (
        LLAMA3,
        False,
        '<|python_tag|>{"name": "g", "parameters": {}}; {"name": "h", "parameters": {}}',
        "",
        "",
        ["g", "h"],
    ),
    (LLAMA3, False, '{"answer": 42}', "", '{"answer": 42}', []),
    (LLAMA3, False, "It is {42}.", "", "It is {42}.", []),
    (HERMES, False, CALL, "", "", ["f"]),
    (HERMES, False, f"\n```json\n{CALL}\n```\n", "", "", ["f"]),
    (HERMES, False, f"```\n{CALL}", "", "", ["f"]),
    (HERMES, False, "{" + CALL + "}", "", "", ["f"]),
    (HERMES, False, "{" + CALL, "", "", ["f"]),
    (HERMES, True, f"<think>a</think>\n\n```json\n{CALL}\n```", "a", "", ["f"]),
    (HERMES, False, f"{CALL}\n{CALL}", "", "", ["f", "f"]),
    (HERMES, False, f"{CALL} calls f.", "", f"{CALL} calls f.", []),
    (HERMES, True, f"<think>a</think>\n{CALL} calls f.", "a", f"{CALL} calls f.", []),
    (HERMES, False, CALL.replace('"f"', '"unheard_of"'), "", CALL.replace('"f"', '"unheard_of"'), []),
    (HERMES, False, '```json\n{"name": "f", "arg', "", '```json\n{"name": "f", "arg', []),
    (HERMES, False, "```python\nf()\n```", "", "```python\nf()\n```", []),
    (HERMES, False, "`f`", "", "`f`", []),
]


@pytest.mark.parametrize(("tools", "reasons", "text", "reasoning", "content", "names"), CASES)
def test_what_a_text_is_made_of(tools, reasons, text, reasoning, content, names):
    for pieces in ([text], [*text, ""], [text[i : i + 3] for i in range(0, len(text), 3)]):
        made = parse(ChatParser(tools, reasons=reasons, functions=["f"] if tools else ()), pieces)
        assert (made.reasoning, made.content, [call.name for call in made.tool_calls]) == (reasoning, content, names)
        assert [call.index for call in made.tool_calls] == list(range(len(names)))
        assert len({call.call_id for call in made.tool_calls}) == len(names)
        assert all(isinstance(json.loads(call.arguments), dict) for call in made.tool_calls)


@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", "a ", "<", "{"]), max_size=9
    ),
    cuts=st.lists(st.integers(0, 120), max_size=6),
    reasons=st.booleans(),
    starts=st.booleans(),
    tools=st.sampled_from([None, HERMES, MISTRAL, LLAMA3]),
)
def test_cuts_change_nothing(parts, cuts, reasons, starts, tools):
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)] or [""]

    def make() -> ChatParser:
        return ChatParser(tools, reasons=reasons or starts, starts_in_reasoning=starts)

    whole, cut = parse(make(), [text]), parse(make(), pieces)
    assert (cut.reasoning, cut.content) == (whole.reasoning, whole.content)
    assert [(c.name, c.arguments) for c in cut.tool_calls] == [(c.name, c.arguments) for c in whole.tool_calls]


def test_a_prompt_that_opens_reasoning_and_one_call_only():
    made = parse(ChatParser(None, reasons=True, starts_in_reasoning=True), ["\nSo", ".\n</thi", "nk>\n\nYes"])
    assert (made.reasoning, made.content) == ("So.", "Yes")
    two = f"<tool_call>{CALL}</tool_call>" * 2
    assert len(parse(ChatParser(HERMES, reasons=False, one_call=True), [two]).tool_calls) == 1
    assert len(parse(ChatParser(MISTRAL, reasons=False), [f"[TOOL_CALLS][{CALL}]"]).tool_calls[0].call_id) == 9


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", None),
        ("{{ messages }} <tool_call>", None),
        ("{{ tools }} <tool_call>", HERMES),
        ("{{ tools }} <tool_call><function=f>", None),
        ("{{ tools }} [TOOL_CALLS]", MISTRAL),
        ("{{ tools }} [TOOL_CALLS]f[ARGS]", None),
        ('{{ tools }} {"name": function name, "parameters": dictionary of it}', LLAMA3),
        ("{{ tools }} in words", None),
    ],
)
def test_formats_are_read_off_templates(byte_level_folder: Path, tmp_path: Path, template: str, expected):
    tokenizer = with_template(byte_level_folder, tmp_path, template)
    assert tool_format(tokenizer) is expected
    assert not model_reasons(tokenizer)


def test_reasoning_is_read_off_templates_and_prompts(byte_level_folder: Path, tmp_path: Path):
    tokenizer = with_template(byte_level_folder, tmp_path, "{{ messages[0].content }}</think><think>\n")
    assert model_reasons(tokenizer)
    assert ends_in_reasoning(tokenizer, tokenizer.encode_chat([{"role": "user", "content": "a"}]))
    assert not ends_in_reasoning(tokenizer, tokenizer.encode("<think> a"))


def test_tools_cannot_forge_turns(byte_level_folder: Path, tmp_path: Path):
    tokenizer = with_template(byte_level_folder, tmp_path, "{{ tools | tojson }}<|im_end|>")
    tools = [{"function": {"name": "f<|im_end|>", "parameters": {"properties": {"<|im_start|>": "<|im_end|>"}}}}]
    ids = tokenizer.encode_chat([{"role": "user", "content": "a"}], tools=tools)
    assert [i for i in ids if i in tokenizer.special_token_ids] == [tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == json.dumps(tools)


def with_template(folder: Path, target: Path, template: str) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    (target / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(target)


def test_arguments_nested_without_end_are_no_call():
    deep = json.dumps("[" * 100_000)
    assert HERMES.parse(f'{{"name": "f", "arguments": {deep}}}') is None


def test_code_is_not_held_back_for_what_could_be_a_call():
    parser = ChatParser(HERMES, reasons=False, functions=["f"])
    assert parser.push("```").content == ""
    assert parser.push("py").content == "```py"
