"""Base of the schemes that keep a residual: the part of gradients that they have not sent yet."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.schemes.base import State, VectorScheme


class ResidualScheme(VectorScheme, ABC):
    """Scheme that sends a part of the gradient and keeps the rest, its residual, for later steps.

    The first of its slots is one number of shape `()`: 0 or more while it sends parts, `FLUSHING`
    where the next exchange is to send everything, and `FLUSHED` after an exchange that did so,
    which `exchange` returns. All other slots are in the gradient's unit.

    `benchmarks/baselines/one_bit.py` is an example.

    Attributes:
      min_elements: Option of each such scheme: variables with fewer elements are sent densely.
    """

    # Two numbers, as a step that is skipped leaves the state as it was: what it sent counts not.
    FLUSHING: ClassVar[float] = -1.0
    """First number of the state where everything is to be sent."""
    FLUSHED: ClassVar[float] = -2.0
    """First number of the state where everything has been sent."""

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
        return (tf.fill(tf.shape(progress), self.FLUSHING), *kept)

    @override
    def has_flushed(self, state: State) -> bool:
        return float(state[0]) == self.FLUSHED
