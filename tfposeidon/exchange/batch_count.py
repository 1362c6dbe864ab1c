"""Number of samples that a rank weighs by, as it is counted in the batch that it trains on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tfposeidon import sample_counts


class BatchCount:
    """Count of the batch that a train step has in hand.

    Keras's train steps call `apply` without a count; `fit` makes it known here around each step.

    Args:
      function: Function from a batch to its count, `None` for the number of its rows; see
        `sample_count` of `DistributedOptimizer`.

    Attributes:
      are_equal: True if ranks have agreed that all batches have as many rows.
    """

    def __init__(self, function: sample_counts.SampleCount | None) -> None:
        self._function = function
        self._current: Any = None
        self.are_equal = False

    @property
    def function(self) -> sample_counts.SampleCount | None:
        """Function that counts, as it was given."""
        return self._function

    @property
    def current(self) -> Any:
        """Count of the batch within `counting`, a scalar; else `None`."""
        return self._current

    def is_of_rows(self, count: Any) -> bool:
        """Returns whether a count is the current batch's number of rows, taken by default.

        Args:
          count: Count that a call of `apply` weighs by.
        """
        return count is not None and count is self._current and self._function is None

    @contextlib.contextmanager
    def counting(self, data: Any) -> Iterator[None]:
        """Makes `apply` weigh this rank by what a batch counts, within this context.

        Args:
          data: Batch as the train step is given it, such as `(x, y, sample_weight)`.

        Raises:
          ValueError: If the function makes more than one number of it.
        """
        count = sample_counts.counted(self._function or sample_counts.batch_size, data)
        self._current, previous = count, self._current
        try:
            yield
        finally:
            self._current = previous
