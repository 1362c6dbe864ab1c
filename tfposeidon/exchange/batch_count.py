"""Number of samples by which a rank is weighted, counted in its current batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tfposeidon import sample_counts


class BatchCount:
    """Count of the batch of the current train step.

    Keras's train steps call `apply` without a count, so `fit` sets it here around each step.
    `are_equal` is true if ranks have agreed that all batches have equally many rows.
    """

    def __init__(self, function: sample_counts.SampleCount | None) -> None:
        self._function = function
        self._current: Any = None
        self.are_equal = False

    @property
    def function(self) -> sample_counts.SampleCount | None:
        """Function from a batch to its count; `None` to count its rows."""
        return self._function

    @property
    def current(self) -> Any:
        """Count of the batch within `counting`, a scalar; else `None`."""
        return self._current

    def is_of_rows(self, count: Any) -> bool:
        """Returns whether a count is the current batch's number of rows, used by default."""
        return count is not None and count is self._current and self._function is None

    @contextlib.contextmanager
    def counting(self, data: Any) -> Iterator[None]:
        """Makes `apply` weight this rank by the count of `data` within this context."""
        count = sample_counts.counted(self._function or sample_counts.batch_size, data)
        self._current, previous = count, self._current
        try:
            yield
        finally:
            self._current = previous
