import pytest

from tfposeidon import text as text_module


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (2.5e6, "2.50 MB"), (3e9, "3.00 GB")],
)
def test_readable(size, text):
    assert text_module.readable(size) == text
