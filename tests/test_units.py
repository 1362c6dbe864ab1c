"""Sizes, rates, durations and shares have the same meaning for all options."""

import pytest

from datacache.system.room import budget_bytes
from tfposeidon.text import parse_duration, parse_rate, parse_share, parse_size, readable_size

KIB, MIB, GIB, TIB = (2 ** (10 * power) for power in (1, 2, 3, 4))
SIZES = {
    "400": 400,
    "0.5kB": 500,
    ".5kb": 500,
    "1.5gb": 1.5e9,
    "1.5GB": 1.5e9,
    " 1.5 GB ": 1.5e9,
    "2TB": 2e12,
    "1kib": KIB,
    "512MiB": 512 * MIB,
    "1.5GiB": 1.5 * GIB,
    "1TIB": TIB,
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_have_decimal_and_binary_prefixes(text):
    """The cache's budget and the lab's memory per rank use the same syntax."""
    assert parse_size(text) == SIZES[text]
    assert budget_bytes(text, 10**15) == SIZES[text]


@pytest.mark.parametrize("text", ["", "GB", "1.5 gigabytes", "-1GB", "1e9", "1GBit", "5%"])
def test_invalid_sizes_are_refused_with_the_meaning_of_prefixes(text):
    with pytest.raises(ValueError, match=r"1.5GB \(powers of ten\) or 1.5GiB \(powers of two\)"):
        parse_size(text)


@pytest.mark.parametrize("budget", ["0", "0%", 0, "101%", "-5", "lots", "1.5 gigabytes", True])
@pytest.mark.parametrize("free", [0, 10**9])
def test_invalid_budgets_are_refused(budget, free):
    with pytest.raises(ValueError, match=r"`budget` must be a size .*powers of two.* Received"):
        budget_bytes(budget, free)


def test_shares_of_free_space_are_exact():
    assert [budget_bytes(f"{share}%", 100) for share in range(1, 101)] == list(range(1, 101))


RATES = {
    "8kbit": 8e3,
    "1.5Gbit": 1.5e9,
    "10mbps": 8e7,
    "1 tbit": 1e12,
    "1Mibit": MIB,
    "200mbit": 2e8,
}


@pytest.mark.parametrize("text", RATES)
def test_rates_have_units_of_bits_or_bytes(text):
    assert parse_rate(text) == RATES[text]


def test_durations_have_units_and_shares_are_percentages():
    assert [parse_duration(text) for text in ("2s", "1.5ms", "3 usec")] == [2, 1.5e-3, 3e-6]
    assert [parse_share("12.5%"), parse_share("0.1%")] == [0.125, 0.001]
    with pytest.raises(ValueError, match=r"A percentage must be at most 100%. Received: '101%'"):
        parse_share("101%")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (2.5e6, "2.50 MB"), (3e9, "3.00 GB")],
)
def test_readable_sizes_have_three_digits(size, text):
    assert readable_size(size) == text
