"""Tool calls and reasoning over HTTP: what the template is given, what the client gets, whole and streamed."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmq.runtime.frontend.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TEMPLATE = """{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}
{{ m.tool_call_id }}<|im_end|>{% endfor %}<|im_start|>assistant
{# </think> #}"""


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory) -> Path:
    """`<tool_call>` and `</tool_call>` are tokens of this model, the first a special one."""
    folder = tmp_path_factory.mktemp("tools") / "tiny"
    folder.mkdir()
    data = json.loads((model_folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id, (name, special) in enumerate((("<tool_call>", True), ("</tool_call>", False)), 512):
        data["added_tokens"].append({"id": token_id, "content": name, "special": special, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_bytes((model_folder / "tokenizer_config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def joined(chunks: list[dict]) -> tuple[dict, str]:
    """What a client of the stream puts together, and the finish reason."""
    message: dict = {"content": ""}
    for choice in (chunk["choices"][0] for chunk in chunks):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, choice["finish_reason"]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls", "finish"),
    [
        (f"Let me see.\n{CALL}\n{CALL}", None, "Let me see.", 2, "tool_calls"),
        (f"<think>\nwhat?\n</think>\n\n{CALL}", "what?", None, 1, "tool_calls"),
        ("<think>hm</think>No.", "hm", "No.", 0, "stop"),
        ("Just text.", None, "Just text.", 0, "stop"),
    ],
)
def test_answers(serving: Callable, folder, tokenizer, text, reasoning, content, num_calls, finish):
    async def body():
        async with serving(script=[*tokenizer.encode(text), 2], folder=folder, vocab_size=514, max_model_len=2000) as s:
            wanted = {"messages": HI, "tools": [WEATHER], "max_tokens": 200, "logprobs": True}
            whole = (await s.post(CHAT, **wanted)).json()["choices"][0]
            chunks = await s.stream(CHAT, **wanted)
        message = whole["message"]
        assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
        calls = message.get("tool_calls", [])
        assert [call["function"]["name"] for call in calls] == ["get_weather"] * num_calls
        assert all(json.loads(call["function"]["arguments"]) == {"city": "Zürich"} for call in calls)
        assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
        assert whole["finish_reason"] == finish
        streamed, streamed_finish = joined(chunks)
        assert streamed_finish == finish
        assert (streamed["content"] or None, streamed.get("reasoning_content")) == (content, reasoning)
        functions = [call["function"] for call in streamed.get("tool_calls", [])]
        assert functions == [call["function"] for call in calls]
        scored = [one for c in chunks if c["choices"][0]["logprobs"] for one in c["choices"][0]["logprobs"]["content"]]
        assert scored == whole["logprobs"]["content"]

    run(body())


def test_the_template_sees_tools_calls_and_results(serving: Callable, folder, tokenizer):
    arguments = {"city": "Zürich"}
    history = [
        *HI,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": json.dumps(arguments)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]

    async def body():
        async with serving(folder=folder, vocab_size=514, max_model_len=2000) as s:
            for choice in ("auto", "none"):
                answer = await s.post(CHAT, messages=history, tools=[WEATHER], tool_choice=choice, max_tokens=1)
                assert answer.status_code == 200, answer.text
            shown, hidden = (tokenizer.decode(r.prompt_token_ids, skip_special_tokens=False) for r in s.engine.added)
        assert json.dumps(WEATHER, ensure_ascii=False) in shown
        assert "get_weather " + json.dumps(arguments, ensure_ascii=False) in shown
        assert "rainc1" in shown
        assert "description" not in hidden

    run(body())


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_a_forced_call_is_a_grammar(serving: Callable, folder, tokenizer, choice, finish):
    async def body():
        async with serving(script=[*tokenizer.encode(CALL), 2], folder=folder, vocab_size=514, max_model_len=2000) as s:
            wanted = {"messages": HI, "tools": [WEATHER], "max_tokens": 200}
            answer = (await s.post(CHAT, tool_choice=choice, **wanted)).json()["choices"][0]
            await s.post(CHAT, tool_choice="auto", **wanted)
            strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
            await s.post(CHAT, **wanted | {"tools": [strict]})
            forced, free, kept = (request.sampling_params.grammar for request in s.engine.added)
            grammars = s.service._reader.grammars
        assert (answer["finish_reason"], len(answer["message"]["tool_calls"])) == (finish, 1)
        assert free is None
        call, ends = tokenizer.encode(CALL), [2]
        bad = tokenizer.encode(CALL.replace("city", "town"))
        assert grammars.matcher(forced).consume_tokens([*call, *ends])
        assert not grammars.matcher(forced).consume_tokens(bad)
        assert not grammars.matcher(forced).consume_tokens(tokenizer.encode("Hello"))
        assert grammars.matcher(forced).consume_tokens([*call, *tokenizer.encode("\n"), *call]) is (
            choice == "required"
        )
        for text, accepted in ((f"Hello {CALL}", True), (CALL.replace("city", "town"), False)):
            assert grammars.matcher(kept).consume_tokens(tokenizer.encode(text)) is accepted

    run(body())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objct"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"messages": [*HI, {"role": "user", "content": "x", "tool_calls": []}]}, "messages"),
        ({"messages": [*HI, {"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages"),
    ],
)
def test_what_cannot_be_is_refused(serving: Callable, folder, body, param):
    async def check():
        async with serving(folder=folder, vocab_size=514, max_model_len=2000) as s:
            answer = await s.post(CHAT, **{"messages": HI, "max_tokens": 1, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert not s.engine.added

    run(check())
