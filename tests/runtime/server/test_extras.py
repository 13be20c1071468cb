"""What vLLM's users know beside OpenAI's API: /tokenize, best_of, beams; and our own `timings`."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from llmq.profiles.errors import InputError
from llmq.runtime.frontend.generation_defaults import generation_defaults
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import BeamParams, TokenLogprobs

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi <|im_end|> é"}]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_tokenize_and_back(serving: Callable, tokenizer: Tokenizer):
    async def body():
        async with serving(max_model_len=100) as s:
            text = "<|im_start|>one two é"
            made = (await s.post("/tokenize", prompt=text, return_token_strs=True)).json()
            assert made["tokens"] == tokenizer.encode(text)
            assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 100)
            assert len(made["token_strs"]) == made["count"]
            assert (await s.post("/detokenize", tokens=made["tokens"])).json() == {"prompt": text}
            chat = (await s.http.post("/tokenize", json={"messages": HI})).json()
            assert chat["tokens"] == tokenizer.encode_chat(HI)
            assert chat["token_strs"] is None
            await s.post(CHAT, messages=HI, max_tokens=1)
            assert s.engine.added[0].prompt_token_ids == chat["tokens"]
            shorter = (await s.post("/tokenize", messages=HI, add_generation_prompt=False)).json()
            assert shorter["tokens"] == tokenizer.encode_chat(HI, add_generation_prompt=False)
            assert (await s.post("/tokenize", prompt="")).json()["tokens"] == []

    run(body())


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 20_000}, 400, "prompt"),
        ("/tokenize", {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}], "x": 1}, 400, "x"),
        ("/detokenize", {"tokens": [512]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ],
)
def test_what_cannot_be_tokenized(serving: Callable, path: str, body: dict, status: int, param: str):
    async def check():
        async with serving() as s:
            answer = await s.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text

    run(check())


def test_best_of_returns_the_likeliest(serving: Callable, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """Sequence i of a prompt has log probability LOGPROBS[i] a token, and i + 1 tokens."""
    likely = [-3.0, -0.5, -2.0, -0.75]

    async def body():
        async with serving() as s:
            advance = s.engine._advance

            def scored(state):
                output = advance(state)
                own = likely[int(output.request_id.rsplit("-", 1)[1]) % 4]
                logprobs = [TokenLogprobs(one.token_id, own, 1, []) for one in output.logprobs]
                return type(output)(
                    **{**{f: getattr(output, f) for f in output.__struct_fields__}, "logprobs": logprobs}
                )

            monkeypatch.setattr(s.engine, "_advance", scored)
            wanted = {"prompt": ["ab", "cd"], "n": 2, "best_of": 4, "max_tokens": 3}
            plain = (await s.post(TEXT, **wanted)).json()
            with_scores = (await s.post(TEXT, **wanted, logprobs=0)).json()
            assert [len(request.forks) for request in s.engine.added[:2]] == [3, 3]
        assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
        assert all(choice["logprobs"] is None for choice in plain["choices"])
        assert plain["usage"]["completion_tokens"] == 2 * 4 * 3
        scores = [choice["logprobs"]["token_logprobs"][0] for choice in with_scores["choices"]]
        assert scores == [-0.5, -0.75, -0.5, -0.75]

    run(body())


def test_beams_reach_the_engine(serving: Callable):
    async def body():
        async with serving() as s:
            wanted = {"prompt": "a", "max_tokens": 3, "use_beam_search": True}
            assert (await s.post(TEXT, **wanted, n=3, beam_width=5, length_penalty=0.5)).status_code == 200
            assert (await s.post(CHAT, messages=HI, max_tokens=1, use_beam_search=True)).status_code == 200
            first, second = s.engine.added
        assert (first.beams, len(first.forks)) == (BeamParams(width=5, length_penalty=0.5), 2)
        assert (second.beams, len(second.forks)) == (BeamParams(width=2), 0)

    run(body())


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_timings_are_in_the_reply(serving: Callable, path: str):
    prompt = {"prompt": "a"} if path == TEXT else {"messages": HI}

    async def body():
        async with serving() as s:
            whole = (await s.post(path, **prompt, max_tokens=5, n=2)).json()
            chunks = await s.stream(path, **prompt, max_tokens=5, n=2, stream_options={"include_usage": True})
            one = (await s.post(path, **prompt, max_tokens=1)).json()
        timed = [chunk for chunk in chunks if "timings" in chunk]
        assert timed == [chunks[-2]]
        for timings in (whole["timings"], timed[0]["timings"]):
            assert set(timings) == {"queue_ms", "ttft_ms", "tpot_ms", "total_ms"}
            assert 0 <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["total_ms"]
            assert timings["tpot_ms"] * 4 == pytest.approx(timings["total_ms"] - timings["ttft_ms"], abs=5)
        assert one["timings"]["tpot_ms"] is None

    run(body())


def test_defaults_of_the_model_hold_where_a_request_says_nothing(serving: Callable):
    async def body():
        async with serving(sampling_defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 40}) as s:
            await s.post(TEXT, prompt="a", max_tokens=1)
            await s.post(CHAT, messages=HI, max_tokens=1, temperature=0, top_k=-1)
            await s.post(TEXT, prompt="a", max_tokens=1, use_beam_search=True)
            sampled = [request.sampling_params for request in s.engine.added]
        asked = [(one.temperature, one.top_p, one.top_k) for one in sampled]
        assert asked == [(0.6, 0.9, 40), (0.0, 0.9, 0), (1.0, 1.0, 0)]

    run(body())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ('{"eos_token_id": 2}', {}),
        ('{"temperature": 0.6, "top_k": 20, "do_sample": true, "max_length": 20}', {"temperature": 0.6, "top_k": 20}),
        ('{"temperature": 0.6, "repetition_penalty": 1.1, "do_sample": false}', {"repetition_penalty": 1.1}),
        ('{"top_p": null, "min_p": 0.1}', {"min_p": 0.1}),
        ('{"top_p": 1.5}', "top_p must be"),
        ('{"top_k": true}', "top_k must be a number"),
        ("{", "--generation-config openai"),
        ("[]", "--generation-config openai"),
    ],
)
def test_generation_config_is_read(tmp_path: Path, text: str | None, expected: dict | str):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    if isinstance(expected, dict):
        assert generation_defaults(tmp_path) == expected
    else:
        with pytest.raises(InputError, match=expected):
            generation_defaults(tmp_path)
