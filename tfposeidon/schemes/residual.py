"""Base of the schemes that keep a residual: the part of gradients that they have not sent yet."""

from __future__ import annotations

from abc import ABC

import tensorflow as tf
from typing_extensions import override

from tfposeidon.schemes.base import State, VectorScheme

FLUSHING, FLUSHED = -1.0, -2.0
"""First number of the state while all is to be sent: before an exchange has done so, and after.

Two numbers, because a step that is skipped leaves the state as it was: what it sent does not count.
"""


class ResidualScheme(VectorScheme, ABC):
    """A scheme that sends a part of the gradient and keeps the rest for later steps.

    The first of its slots is one number, from 0 up while it sends parts, `FLUSHING` or `FLUSHED`
    otherwise; `exchange` turns the former into the latter. All other slots are in the gradient's
    unit.
    """

    min_elements: int

    @property
    @override
    def exact(self) -> bool:
        return False

    @property
    @override
    def min_length(self) -> int:
        return self.min_elements

    @override
    def rescaled(self, state: State, factor: tf.Tensor) -> State:
        # What was kept at rate a and is sent at rate b would otherwise count b / a times.
        progress, *kept = state
        return (progress, *(tensor * factor for tensor in kept))

    @override
    def flushing(self, state: State) -> State:
        progress, *kept = state
        return (tf.fill(tf.shape(progress), FLUSHING), *kept)

    @override
    def has_flushed(self, state: State) -> bool:
        return float(state[0]) == FLUSHED
