"""What callers write as a grammar, in either of the two common notations, as llguidance's."""

import json
import re
import sys
from collections.abc import Iterator

from llguidance import LLMatcher

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
# llguidance samples with a temperature of a rule's own where it drives the sampling: here it does not.
_OWN_TEMPERATURE = re.compile(r"^\s*\??[\w-]+\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    | (?P<head>[\w-]+)\s*::=
    | (?P<name>[\w-]+)
    | "(?P<text>(?:[^"\\\n]|\\.)*)"
    | \[(?P<set>(?:[^\]\\]|\\.)*)\]
    | (?P<any>\.)
    | (?P<mark>[()|*+?]|\{\s*[0-9]{1,9}\s*(?:,\s*[0-9]{0,9}\s*)?\})""",
    re.VERBOSE | re.DOTALL,
)
_LETTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {mark: mark for mark in '"\\[]-^'}


class GrammarSourceError(ValueError):
    """What is wrong with a text that should be a grammar."""


def grammar_of_source(source: str) -> str:
    """GBNF (llama.cpp's and xgrammar's EBNF, known by its `::=`, from `root`) or Lark as llguidance reads it (from
    `start`). Raises GrammarSourceError; not for all that is wrong, which shows when the grammar is compiled."""
    if not source.strip():
        raise GrammarSourceError("it is empty")
    if _GBNF_RULE.search(source):
        source = lark_of_gbnf(source)
    elif _OWN_TEMPERATURE.search(source):
        raise GrammarSourceError("a temperature of a rule is not supported")
    return LLMatcher.grammar_from_lark(source)


def lark_of_gbnf(source: str) -> str:
    """The same language, letter by letter. A Lark terminal takes all the letters that it can, and GBNF knows no such
    thing (`num "\\n"` must end though `num` may end in blanks), so each terminal here is of one letter."""
    heads, names, written = {}, {}, []
    for kind, value, where in _tokens(source):
        if kind == "head":
            if value in heads:
                raise GrammarSourceError(f"{where}: there are two rules {value!r}")
            heads[value] = where
            written.append(f"\n{_rule_name(value)}:")
        elif not heads:
            raise GrammarSourceError(f"{where}: a rule must begin here: name ::= …")
        elif kind == "name":
            names.setdefault(value, where)
            written.append(_rule_name(value))
        elif kind == "text":
            letters = [json.dumps(letter, ensure_ascii=False) for letter, _ in _letters(value, where)]
            written.append(f"({' '.join(letters)})" if letters else '""')
        elif kind == "set":
            written.append(_letter_set(value, where))
        else:
            written.append("/(?s:.)/" if kind == "any" else value)
    for name, where in [*names.items(), ("root", "nowhere")]:
        if name not in heads:
            raise GrammarSourceError(f"{where}: there is no rule {name!r}")
    return " ".join(written)


def _tokens(source: str) -> Iterator[tuple[str, str, str]]:
    """(kind, text, line for people) of everything but blanks and comments."""
    position, line = 0, 1
    while position < len(source):
        found = _TOKEN.match(source, position)
        if found is None:
            raise GrammarSourceError(f"line {line}: not GBNF from here: {source[position : position + 30]!r}")
        if found.lastgroup != "space":
            yield found.lastgroup, found[found.lastgroup], f"line {line}"
        position, line = found.end(), line + found[0].count("\n")


def _letters(text: str, where: str) -> Iterator[tuple[str, bool]]:
    """(letter, was it escaped)."""
    for found in _LETTER.finditer(text):
        *numbers, escaped, plain = found.groups()
        if escaped is not None and escaped not in _ESCAPES:
            raise GrammarSourceError(f"{where}: \\{escaped} is no escape of GBNF")
        number = next((int(digits, 16) for digits in numbers if digits), 0)
        if number > sys.maxunicode or 0xD800 <= number < 0xE000:
            raise GrammarSourceError(f"{where}: {found[0]} is no letter")
        if plain is not None:
            yield plain, False
        else:
            yield (_ESCAPES[escaped] if escaped is not None else chr(number)), True


def _letter_set(text: str, where: str) -> str:
    """`[^a-z]` as a regular expression of one letter."""
    negated = text.startswith("^")
    letters = list(_letters(text[1:] if negated else text, where))
    if not letters:
        raise GrammarSourceError(f"{where}: an empty set of letters")
    written = []
    for index, (letter, escaped) in enumerate(letters):
        is_range = letter == "-" and not escaped and 0 < index < len(letters) - 1
        written.append("-" if is_range else f"\\x{{{ord(letter):x}}}")
    return f"/[{'^' if negated else ''}{''.join(written)}]/"


def _rule_name(name: str) -> str:
    """Lark's names are of small letters; what is another rule stays another."""
    return "start" if name == "root" else "r_" + "".join(c if c in _PLAIN else f"_{ord(c):x}_" for c in name)


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
