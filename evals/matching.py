"""When a generated answer counts: the four ways in which a reference is matched."""

import math
import re
from collections.abc import Callable

# 1,234.5 or -3 or 2e-3; the sign of a range ("3-4") is none, nor is a digit of a word ("x3") a number.
_NUMBER = re.compile(r"(?<![A-Za-z0-9.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?")
_REL_TOLERANCE = 1e-6


def exact(answer: str, reference: str) -> bool:
    """Equal, white space around both taken off."""
    return answer.strip() == reference.strip()


def contains(answer: str, reference: str) -> bool:
    """The reference stands somewhere in the answer, as written."""
    return reference.strip() in answer


def regex(answer: str, reference: str) -> bool:
    """The reference, as Python's `re` reads it, is found somewhere in the answer."""
    return re.search(reference, answer) is not None


def numeric(answer: str, reference: str) -> bool:
    """The last number of the answer is the reference, to a millionth of it."""
    found, wanted = last_number(answer), last_number(reference)
    return found is not None and wanted is not None and math.isclose(found, wanted, rel_tol=_REL_TOLERANCE)


def last_number(text: str) -> float | None:
    """`1,234.50 dollars` -> 1234.5"""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return float(found[-1].replace(",", "")) if found else None


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": exact,
    "contains": contains,
    "regex": regex,
    "numeric": numeric,
}


def problem_of(match: str, reference: str) -> str | None:
    """Why no answer could match this reference; None where one could."""
    if match == "regex":
        try:
            re.compile(reference)
        except re.error as error:
            return f"the answer {reference!r} is no regular expression: {error}"
    if match == "numeric":
        try:
            float(reference.strip().replace(",", ""))
        except ValueError:
            return f"the answer {reference!r} is no number, which match 'numeric' compares"
    return None
