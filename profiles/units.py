"""Byte and token counts as people write and read them. GiB = 2^30 B, GB = 10^9 B: never mixed, always named."""

import re

from llmq.profiles.errors import InputError

_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTE_UNITS = {"b": 1, **_BINARY, **_DECIMAL}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of "80GiB" (2^30), "80GB" (10^9) or "1024" (bytes). Raises InputError for anything else, "80G" too."""
    match = _NUMBER.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if not match or (unit and unit not in _BYTE_UNITS):
        raise InputError(
            f"'{text}' is no size: write a number with GiB (2^30 bytes), GB (10^9), MiB, MB or B, as 80GiB"
        )
    if not unit and float(match.group(1)) < 4096:
        raise InputError(f"'{text}' is {text} bytes: give the unit that is meant, as {text}GiB")
    return (
        int(float(match.group(1)) * _BYTE_UNITS.get(unit, 1)) if "." in match.group(1) or unit else int(match.group(1))
    )


def parse_tokens(text: str) -> int:
    """Tokens of "256k" (k = 1024: 262,144), "1m" (1,048,576) or "256000" (as written). Raises InputError."""
    match = _NUMBER.fullmatch(text.replace("_", "").replace(",", ""))
    unit = match.group(2).lower() if match else ""
    scale = {"": 1, "k": 1024, "ki": 1024, "m": 1024**2, "mi": 1024**2}.get(unit)
    value = float(match.group(1)) * scale if match and scale else 0
    if value < 1 or value != int(value):
        raise InputError(f"'{text}' is no number of tokens: write 256000, or 256k (k = 1024 tokens: 262,144)")
    return int(value)


def format_bytes(count: float) -> str:
    """138.2 MiB: one decimal, the largest binary unit that leaves at least 1 before it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def format_bytes_exact(count: int) -> str:
    """138.2 MiB (144,911,360 B)."""
    return f"{count:,} B" if abs(count) < 1024 else f"{format_bytes(count)} ({count:,} B)"


def format_bytes_both(count: int) -> str:
    """80.0 GiB (85.9 GB): in the unit that memory is made in, and in the one that it is sold in."""
    if abs(count) < 10**9:
        return format_bytes(count)
    return f"{format_bytes(count)} ({count / 10**9:,.1f} GB)"


def format_share(share: float) -> str:
    """`1.23%`, `0.00321%`: three digits, however small."""
    return f"{100 * share:.3g}%"


def format_count(number: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
