"""Ranks with exhausted input: whether steps watch for them, and their number.

Ranks may have different numbers of batches. A rank without a batch joins the steps of the others,
and this module counts such ranks.
"""

from __future__ import annotations

import tensorflow as tf


class Absence:
    """Number of ranks that took part in a step without a batch of their own.

    Steps that are traced while it is watched skip their update on all ranks if one rank's input is
    exhausted. The training loop requests that, and ends the epoch on all ranks together.
    """

    def __init__(self) -> None:
        self._is_watched = False
        self._ranks: tf.Variable | None = None
        self._complete: tf.Variable | None = None

    def build(self) -> None:
        """Creates the variables for the numbers, before a step is traced."""
        self._ranks = tf.Variable(0.0, trainable=False, name="absent")
        self._complete = tf.Variable(tf.zeros([], tf.int64), trainable=False, name="complete")

    def watch(self, wanted: bool) -> None:
        """Sets whether later traced steps skip updates if a rank's input is exhausted."""
        self._is_watched = wanted
        # Discard the number of an interrupted `fit`.
        self.forget()

    @property
    def is_watched(self) -> bool:
        """True if steps skip updates on all ranks if one rank's input is exhausted."""
        return self._is_watched

    @property
    def ranks(self) -> int:
        """Maximum number of ranks without a batch in a step of this epoch."""
        return 0 if self._ranks is None else int(self._ranks.numpy())

    @property
    def complete(self) -> int:
        """Number of watched exchanges so far in which every rank had a batch."""
        return 0 if self._complete is None else int(self._complete.numpy())

    def forget(self) -> None:
        """Starts another epoch, in which no rank's input is exhausted yet."""
        if self._ranks is not None:
            self._ranks.assign(0.0)

    def note(self, ranks: int) -> None:
        """Records a number that was found between two steps."""
        if self._ranks is not None:
            self._ranks.assign(max(self.ranks, ranks))

    def record(self, ranks: tf.Tensor) -> tf.Tensor | None:
        """Records a step's number in the step; returns whether it is 0; `None` if not watched."""
        assert self._ranks is not None
        # Assign it in every step, because TensorFlow prunes a collective whose result is unused.
        # Retain the maximum, because a later exchange of the same execution, such as one within the
        # node, may only include ranks with data.
        self._ranks.assign(tf.maximum(self._ranks, ranks))
        if not self._is_watched:
            return None
        assert self._complete is not None
        self._complete.assign_add(tf.cast(ranks == 0.0, tf.int64))
        return ranks == 0.0
