"""Tests checks of values that must be equal on all ranks."""

import pytest

from tfposeidon.checks import at_first_entry, at_first_item, in_full, require_equal

RULE, REMEDY = "All ranks must pass the same value", "Pass it on every rank."


@pytest.mark.parametrize(
    ("received", "show", "message"),
    [
        ([1, 1, 2], in_full, "1 on rank 0, 2 on rank 2"),
        ({1: "a", 3: "b"}, in_full, "'a' on rank 1, 'b' on rank 3"),
        (
            ["ab", "ac"],
            at_first_item("letter"),
            "first difference at letter 1: b on rank 0, c on rank 1",
        ),
        (
            ["ab", "a"],
            at_first_item("letter"),
            "first difference at letter 1: b on rank 0, none (there are 1) on rank 1",
        ),
        (
            [{"a": 1, "b": 2}, {"a": 1, "b": 3}],
            at_first_entry(),
            "b 2 on rank 0, 3 on rank 1",
        ),
        ([{}, {"a": None}], at_first_entry(), "a none on rank 0, None on rank 1"),
    ],
)
def test_the_first_rank_that_differs_is_named(received, show, message):
    with pytest.raises(ValueError, match="must pass the same value") as raised:
        require_equal(received, RULE, REMEDY, show, ValueError)
    assert str(raised.value) == f"{RULE}. Received: {message}. {REMEDY}"


def test_equal_values_pass():
    require_equal([{"a": [1]}] * 3, RULE, REMEDY)
    require_equal({2: "a"}, RULE, REMEDY)
