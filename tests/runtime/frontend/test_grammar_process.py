"""Grammars that callers wrote: both notations are followed, and none takes more than it may."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.grammar_messages import Advance, Begin
from llmq.runtime.frontend.grammar_process import CHECK_S, TOO_COSTLY, GrammarFaultError, GrammarProcesses
from llmq.runtime.frontend.tokenizer import Tokenizer

VOCAB_SIZE, END = 512, 2
ARITHMETIC = r"""
root   ::= (expr "=" ws term "\n")+
expr   ::= term ([-+*/] term)*
term   ::= ident | num | "(" ws expr ")" ws
ident  ::= [a-z] [a-z0-9_]* ws
num    ::= [0-9]+ ws
ws     ::= [ \t\n]*
"""
LARK_LIST = """
start: "[" (NUMBER ("," NUMBER)*)? "]"
NUMBER: /-?[0-9]{1,5}/
"""
# What nobody should write and anybody can. Each is either refused, or ends, or is followed in time.
HOSTILE = {
    "ambiguous border": "start: / +/ / +/",
    "four of them": "start: / +/ / +/ / +/ / +/",
    "in GBNF": 'root ::= a a\na ::= b\nb ::= " "+',
    "exponentially ambiguous": 'start: s\ns: s s s | s s | "x" | ""',
    "left-recursive": 'start: a\na: a "x" | "x"',
    "recursive on nothing": 'start: a\na: a | b a | "x"\nb: ""',
    "doubling": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(200)) + '\na200: "x" | ""',
    "a regex that explodes": "start: /(.*a.{60}){3}/",
    "an intersection": "start: X\nX: /(?s:.*)a(?s:.{30})/ & /(?s:.*)b(?s:.{31})/ & ~/(?s:.*)c(?s:.{32})/",
    "repeated": 'start: ((("x"{0,1000}){0,1000}){0,1000}){0,1000}',
    "deep": "start: " + "(" * 3000 + '"x"' + ")" * 3000,
    "deep in GBNF": "root ::= " + "(" * 3000 + '"x"' + ")" * 3000,
    "wide": "start: " + " | ".join(f"/[a-z]+{i}/" for i in range(3000)),
    "huge": "start: " + " ".join(f'"{i}"' for i in range(100_000)),
}


@pytest.fixture(scope="module")
def folder(byte_level_folder: Path) -> Path:
    return byte_level_folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def processes(folder: Path) -> Iterator[GrammarProcesses]:
    made = GrammarProcesses(folder, VOCAB_SIZE, [END])
    yield made
    made.close()


def follow(processes: GrammarProcesses, source: str, token_ids: list[int] | None = None, steps: int = 40) -> list[int]:
    """The ids of a random output of at most `steps` tokens, or of `token_ids` as far as the grammar allows them."""
    follower = processes.connect()
    question, written, random = Begin(processes.check(source, "g"), []), [], np.random.default_rng(0)
    try:
        while len(written) < steps:
            follower.ask(question)
            mask = np.frombuffer(follower.answer(time.monotonic() + CHECK_S).mask, np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:VOCAB_SIZE]).tolist()
            token_id = random.choice(allowed) if token_ids is None else [*token_ids, END][len(written)]
            if token_id not in allowed:
                break
            written.append(int(token_id))
            if token_id == END:
                break
            question = Advance([int(token_id)])
        return written
    finally:
        follower.close()


@pytest.mark.parametrize(
    ("source", "texts", "wrong"),
    [
        (ARITHMETIC, ["a_1+2=3\n", "( x)*2 =y \n\n", "1=2\n3=4\n"], ["a+=1\n", "1\n", "1=2"]),
        (LARK_LIST, ["[]", "[1,-22]"], ["[,]", "[1", "[123456]"]),
        ('root ::= "\\u00e9\\U0001F600" "é" [\\u00e0-\\u00ff^]', ["é😀éû", "é😀é^"], ["é😀éx"]),
        (
            r'root ::= [^\]"\x61\\-] . ("\"" | [-+])? # "end"' + "\n\n",
            ['bc"', "b\n-", "éé"],
            ["ac", "b", "]b", "\\b", "-b"],
        ),
        ('root ::= (a | B){2} a\na ::= | "true"\nB ::=\n  [a-z]+', ["true", "xtrue", "", "abctruedtrue"], ["1"]),
        ('start: "no" | "yes"\n', ["no", "yes"], ["maybe", "noyes"]),
    ],
    ids=["GBNF", "Lark", "letters", "sets", "names", "choice"],
)
def test_both_notations_are_followed(processes, tokenizer, source: str, texts: list[str], wrong: list[str]):
    for text in texts:
        ids = tokenizer.encode_literally(text)
        assert follow(processes, source, ids) == [*ids, END], text
    for text in wrong:
        ids = tokenizer.encode_literally(text)
        assert follow(processes, source, ids) != [*ids, END], text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "is empty"),
        ("start: (", "cannot be followed"),
        ('root ::= "a" missing', "line 1: there is no rule 'missing'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: there are two rules 'root'"),
        ('x ::= "a"', "there is no rule 'root'"),
        ('start: x\nx[temperature=0.5]: "a"', "temperature of a rule"),
        ('root ::= "\\q"', "is no escape"),
        ("root ::= [\\ud800]", "is no letter"),
        ('root ::= "a" &', "line 1: not GBNF from here: '&'"),
        ('"a"\nroot ::= "a"', "a rule must begin here"),
        ("start: <|unheard_of|>", "cannot be followed"),
        ("start: @other", "cannot be followed"),
    ],
    ids=repr,
)
def test_what_is_no_grammar_is_told(processes, source: str, words: str):
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs") as refused:
        processes.check(source, "structured_outputs")
    assert words in refused.value.message


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_ends_in_time_and_alone(processes, tokenizer, source: str):
    started_s = time.process_time()
    with contextlib.suppress(InvalidRequestError, GrammarFaultError):
        follow(processes, source, steps=5)
    assert time.process_time() - started_s < 1, "it costs this process"
    assert follow(processes, LARK_LIST, tokenizer.encode_literally("[7]"))[-1] == END


def test_what_explodes_later_ends_then(processes, tokenizer):
    spaces, first = 'start: ("zq" | "zk") ("zq" | "zk") / +/ / +/', tokenizer.encode_literally("zqzk")
    follower, neighbour = processes.connect(), processes.connect()
    follower.ask(Begin(processes.check(spaces, "g"), []))
    follower.answer(time.monotonic() + CHECK_S)
    neighbour.ask(Begin(processes.check(LARK_LIST, "g"), []))
    follower.ask(Advance(first))
    assert neighbour.answer(time.monotonic() + CHECK_S).mask
    with pytest.raises(GrammarFaultError, match="too much time"):
        follower.answer(time.monotonic() + CHECK_S)
    with pytest.raises(GrammarFaultError):
        follower.ask(Advance([]))
    neighbour.ask(Advance(tokenizer.encode_literally("[")))
    assert neighbour.answer(time.monotonic() + CHECK_S).mask


def test_nobody_waits_longer_than_the_deadline(processes):
    follower = processes.connect()
    follower.ask(Begin('{"grammars": [{"lark_grammar": "start: / +/ / +/"}]}', []))
    started_s = time.monotonic()
    with pytest.raises(GrammarFaultError) as ended:
        follower.answer(started_s + 0.05)
    assert str(ended.value) == TOO_COSTLY
    assert time.monotonic() - started_s < 0.5
    follower.close()


def test_a_killed_process_is_started_anew(folder: Path):
    processes = GrammarProcesses(folder, VOCAB_SIZE, [END])
    grammar = processes.check(LARK_LIST, "g")
    os.kill(processes._process.pid, signal.SIGKILL)
    processes._process.wait()
    assert processes.check(LARK_LIST, "g") == grammar
    processes.close()


def test_a_model_that_is_not_there_is_told(tmp_path: Path):
    processes = GrammarProcesses(tmp_path, VOCAB_SIZE, [END])
    with pytest.raises(RuntimeError, match="does not start"):
        processes.check(LARK_LIST, "g")


_NAMES = st.sampled_from(["start", "a", "b", "T", "U"])
_ATOMS = st.one_of(_NAMES, st.sampled_from(['"x"', '""', "/ +/", "/[a-z]*/", '"("', "/x{0,9}/", "%json {}"]))
_BODIES = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(" ".join),
        st.lists(inner, min_size=1, max_size=4).map(lambda parts: f"({' | '.join(parts)})"),
        st.tuples(inner, st.sampled_from("*+?")).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)
_GRAMMARS = st.dictionaries(_NAMES, _BODIES, min_size=1).map(
    lambda rules: "\n".join(f"{name}: {body}" for name, body in rules.items())
)


@given(source=st.one_of(_GRAMMARS, _GRAMMARS.map(lambda text: text.replace(": ", " ::= ")), st.text(max_size=60)))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text_is_followed_or_refused(processes, source: str):
    with contextlib.suppress(InvalidRequestError, GrammarFaultError):
        follow(processes, source, steps=4)
