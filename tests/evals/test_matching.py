import pytest

from llmq.evals.matching import MATCHES, last_number


@pytest.mark.parametrize(
    ("match", "answer", "reference", "counts"),
    [
        ("exact", " 4\n", "4", True),
        ("exact", "4.", "4", False),
        ("contains", "It is Paris.", " Paris ", True),
        ("contains", "It is paris.", "Paris", False),
        ("regex", "It is paris.", "(?i)paris\\b", True),
        ("regex", "Parish", "Paris\\b", False),
        ("numeric", "First 3, then 1,234.50 dollars.", "1234.5", True),
        ("numeric", "3 of 4", "3", False),
        ("numeric", "none", "0", False),
        ("numeric", "0.0000001", "0", False),
    ],
)
def test_an_answer_counts(match, answer, reference, counts):
    assert MATCHES[match](answer, reference) is counts


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-5", -5),
        ("3-4", 4),
        ("**18**", 18),
        ("$18.", 18),
        ("x3", None),
        ("2e-3", 0.002),
        (".5", 0.5),
        ("\N{MINUS SIGN}7", -7),
        ("1,2345", 2345),
        ("v1.2.3", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number
