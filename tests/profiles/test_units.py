import pytest

from llmq.profiles.errors import InputError
from llmq.profiles.units import format_bytes, format_bytes_exact, format_count, format_share, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80gib", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("0.1GB", 10**8),  # exact, though 0.1 is no float
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_bytes_in_binary_and_decimal_units(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["80G", "80Gi", "", "GiB", "-1GiB", "1e9", "80 GiB GiB"])
def test_a_size_that_could_be_read_two_ways_is_refused(text):
    with pytest.raises(InputError, match="GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256000", 256_000), ("256k", 262_144), ("256K", 262_144), ("1m", 1_048_576), ("0.5k", 512), ("128_000", 128_000)],
)
def test_tokens(text, expected):
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "0.3k", "2x", "k", ""])
def test_no_number_of_tokens(text):
    with pytest.raises(InputError, match="tokens"):
        parse_tokens(text)


def test_bytes_are_written_in_the_largest_unit_with_the_exact_count_on_demand():
    assert [format_bytes(n) for n in (0, 1023, 1024, 2**20 * 180, 2**40)] == [
        "0 B", "1,023 B", "1.0 KiB", "180.0 MiB", "1.0 TiB",
    ]  # fmt: skip
    assert format_bytes_exact(144_911_360) == "138.2 MiB (144,911,360 B)"
    assert format_bytes_exact(12) == "12 B"


def test_one_is_singular():
    assert [format_count(n, "request") for n in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]


def test_a_share_has_three_digits_however_small():
    assert [format_share(share) for share in (0.0, 0.3, 0.012345, 3.214e-5)] == ["0%", "30%", "1.23%", "0.00321%"]
