"""Streams equal the whole, whatever the cuts: UTF-8, stop strings, counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.runtime.frontend.detokenizer import IncrementalDetokenizer, StopStringMatcher
from llmq.runtime.frontend.output_processor import OutputProcessor, SequenceOutput
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import RequestOutput, TokenLogprobs


def by_character(text: str, stop: list[str]) -> str:
    """The definition: text up to the start of the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


def stream(pieces: list[str], stop: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stop)
    out = [matcher.push(piece) for piece in pieces]
    if matcher.matched is None:
        out.append(matcher.flush())
    return out, matcher.matched


pieces_of_ab = st.lists(st.text("abc", max_size=4), max_size=8)


@given(pieces=pieces_of_ab, stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
@settings(max_examples=400)
def test_stop_strings_do_not_depend_on_the_cuts(pieces: list[str], stop: list[str]):
    out, matched = stream(pieces, stop)
    text = "".join(pieces)
    assert "".join(out) == by_character(text, stop)
    assert (matched is not None) == any(s in text for s in stop)


@given(pieces=pieces_of_ab, stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_more_is_held_back_than_must_be(pieces: list[str], stop: list[str]):
    matcher = StopStringMatcher(stop)
    given_out = "".join(matcher.push(piece) for piece in pieces)
    held = "".join(pieces)[len(given_out) :]
    if matcher.matched is None:
        assert held == "" or any(s.startswith(held) for s in stop)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(text=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_streamed_characters_come_whole(kind: str, text: str, request: pytest.FixtureRequest):
    """Every id is pushed alone: the finest cut there is."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode_literally(text)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    joined = "".join(deltas)
    assert joined == tokenizer.decode(ids) or (kind == "sentencepiece" and joined == " " + tokenizer.decode(ids))
    assert joined.removeprefix(" " if kind == "sentencepiece" else "") == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@given(ids=st.lists(st.integers(0, 511), max_size=30), steps=st.lists(st.integers(1, 4), max_size=30))
@settings(max_examples=200, deadline=None)
def test_several_tokens_a_step_are_the_same_text(ids: list[int], steps: list[int], byte_level: Tokenizer):
    one = SequenceOutput("a", byte_level, stop=["th", "e "])
    many = SequenceOutput("b", byte_level, stop=["th", "e "])
    for token_id in ids:
        if one.finish_reason is None:
            one.process(RequestOutput(request_id="a", new_token_ids=[token_id]))
    position = 0
    for size in [*steps, *[1] * len(ids)]:
        if position < len(ids) and many.finish_reason is None:
            many.process(RequestOutput(request_id="b", new_token_ids=ids[position : position + size]))
            position += size
    for sequence in (one, many):
        if sequence.finish_reason is None:
            sequence.process(RequestOutput(request_id="c", finish_reason="length"))
    assert (one.text, one.token_ids, one.finish_reason) == (many.text, many.token_ids, many.finish_reason)


def test_bytes_that_can_be_no_character_appear_at_once_and_an_unfinished_one_never(byte_level: Tokenizer):
    (llama_1, llama_2, llama_3, llama_4) = (_byte_token(byte_level, byte) for byte in "🦙".encode())
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.push(i) for i in (llama_1, llama_2, llama_3, llama_4)] == ["", "", "", "🦙"]
    assert [detokenizer.push(i) for i in (llama_1, llama_1, llama_2)] == ["", "\ufffd", ""]
    cut = SequenceOutput("a", byte_level)
    cut.process(RequestOutput(request_id="a", new_token_ids=[_byte_token(byte_level, ord("x")), llama_1, llama_2]))
    cut.process(RequestOutput(request_id="a", new_token_ids=[llama_3], finish_reason="length"))
    assert (cut.text, len(cut.token_ids)) == ("x", 4)


def test_stop_string_over_tokens_is_cut_counted_and_aborted(byte_level: Tokenizer):
    ids = [_byte_token(byte_level, ord(c)) for c in "ABCDEFG"]
    processor = OutputProcessor(byte_level)
    sequence = processor.add("r", stop=["CDE"])
    seen = []
    for position, step in enumerate((ids[:1], ids[1:3], ids[3:])):
        deltas, aborted = processor.process([RequestOutput(request_id="r", new_token_ids=step)])
        seen += [delta.text for delta in deltas]
        assert aborted == (["r"] if position == 2 else [])
    assert seen == ["A", "B", ""]
    assert sequence.token_ids == ids[:5]
    assert (sequence.text, sequence.finish_reason) == ("AB", "stop")
    assert processor.process([RequestOutput(request_id="r", finish_reason="abort")]) == ([], [])


def test_held_text_is_released_at_the_end(byte_level: Tokenizer):
    ids = [_byte_token(byte_level, ord(c)) for c in "ABCD"]
    sequence = SequenceOutput("r", byte_level, stop=["CDZ"])
    first = sequence.process(RequestOutput(request_id="r", new_token_ids=ids))
    last = sequence.process(RequestOutput(request_id="r", finish_reason="length"))
    assert (first.text, last.text, sequence.text) == ("AB", "CD", "ABCD")


def test_end_tokens_are_counted_but_are_no_text(byte_level: Tokenizer):
    letter = _byte_token(byte_level, ord("A"))
    by_model = SequenceOutput("r", byte_level)
    delta = by_model.process(
        RequestOutput(request_id="r", new_token_ids=[letter, 2], finish_reason="stop", stop_token_id=2)
    )
    assert (delta.text, delta.token_ids) == ("A", [letter, 2])
    by_id = SequenceOutput("r", byte_level)
    delta = by_id.process(
        RequestOutput(request_id="r", new_token_ids=[letter], finish_reason="stop", stop_token_id=letter)
    )
    assert (delta.text, delta.token_ids) == ("", [letter])


def test_stop_strings_wait_for_min_tokens(byte_level: Tokenizer):
    ids = [_byte_token(byte_level, ord(c)) for c in "AXBXC"]
    sequence = SequenceOutput("r", byte_level, stop=["X"], min_tokens=3)
    sequence.process(RequestOutput(request_id="r", new_token_ids=ids))
    assert (sequence.text, len(sequence.token_ids)) == ("AXB", 4)


def test_log_probabilities_carry_the_offset_of_their_text(byte_level: Tokenizer):
    ids = [_byte_token(byte_level, byte) for byte in "a🦙b".encode()]
    scores = [TokenLogprobs(token_id, -0.5, 1, []) for token_id in ids]
    sequence = SequenceOutput("r", byte_level, stop=["b"])
    delta = sequence.process(RequestOutput(request_id="r", new_token_ids=[*ids, 5], logprobs=[*scores, scores[0]]))
    assert [scored.text_offset for scored in delta.scored_tokens] == [0, 1, 1, 1, 1, 2]
    assert [scored.logprobs.token_id for scored in delta.scored_tokens] == ids


def _byte_token(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))
