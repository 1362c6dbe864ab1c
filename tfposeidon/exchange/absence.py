"""Ranks that are out of data: whether steps watch for them, and how many there were."""

from __future__ import annotations

import tensorflow as tf


class Absence:
    """Number of ranks that took part in a step without a batch of their own.

    Steps that are traced while it is watched drop their update on all ranks if one is out of data.
    The training loop asks for that, and ends the epoch together with the other ranks.
    """

    def __init__(self) -> None:
        self._is_watched = False
        self._ranks: tf.Variable | None = None
        self._complete: tf.Variable | None = None

    def build(self) -> None:
        """Makes the variables that steps leave the numbers in, before a step is traced."""
        self._ranks = tf.Variable(0.0, trainable=False, name="absent")
        self._complete = tf.Variable(tf.zeros([], tf.int64), trainable=False, name="complete")

    def watch(self, wanted: bool) -> None:
        """Sets whether steps drop their updates on all ranks if one of them is out of data.

        Args:
          wanted: True if steps that are traced from now on do so.
        """
        self._is_watched = wanted
        # What a `fit` that was interrupted has left.
        self.forget()

    @property
    def is_watched(self) -> bool:
        """True if steps drop their updates on all ranks if one of them is out of data."""
        return self._is_watched

    @property
    def ranks(self) -> int:
        """Ranks that had no batch left, at most, in a step of this epoch that was watched."""
        return 0 if self._ranks is None else int(self._ranks.numpy())

    @property
    def complete(self) -> int:
        """Number of watched exchanges so far in which every rank had a batch."""
        return 0 if self._complete is None else int(self._complete.numpy())

    def forget(self) -> None:
        """Begins another epoch, in which no rank is out of data yet."""
        if self._ranks is not None:
            self._ranks.assign(0.0)

    def note(self, ranks: int) -> None:
        """Keeps a number that was found between two steps."""
        if self._ranks is not None:
            self._ranks.assign(max(self.ranks, ranks))

    def record(self, ranks: tf.Tensor) -> tf.Tensor | None:
        """Keeps the number that a step has found, as a part of the step.

        Args:
          ranks: Number of ranks without a batch, a float32 scalar.

        Returns:
          True if every rank had a batch, a bool scalar; `None` where that is not watched.
        """
        assert self._ranks is not None
        # Read by nobody in most steps, but TensorFlow leaves out a collective whose result is not
        # used. The largest, as a later exchange of the same execution, such as one in the node,
        # may be of ranks that all have data.
        self._ranks.assign(tf.maximum(self._ranks, ranks))
        if not self._is_watched:
            return None
        assert self._complete is not None
        self._complete.assign_add(tf.cast(ranks == 0.0, tf.int64))
        return ranks == 0.0
