"""Base class of schemes with a residual, the part of gradients that is not sent yet."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.schemes.base import Scheme, State


class ResidualScheme(Scheme, ABC):
    """Scheme that sends a part of the gradient and retains the rest as residual for later steps.

    The first of its slots has shape `()`. It is 0 or more while the scheme sends parts, and
    `FLUSHING` if the next exchange must send everything; that exchange returns `FLUSHED`. All other
    slots are in the gradient's unit.

    `benchmarks/baselines/one_bit.py` is an example.

    Attributes:
      min_elements: Option of each such scheme: variables with fewer elements are sent densely.
    """

    # Two numbers, because a skipped step discards the new state: its exchange does not count.
    FLUSHING: ClassVar[float] = -1.0
    """First number of the state if the next exchange must send everything."""
    FLUSHED: ClassVar[float] = -2.0
    """First number of the state after an exchange that sent everything."""

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
        # A residual stored at learning rate a and sent at rate b would otherwise count b / a times.
        progress, *kept = state
        return (progress, *(tensor * factor for tensor in kept))

    @override
    def flushing(self, state: State) -> State:
        progress, *kept = state
        return (tf.fill(tf.shape(progress), self.FLUSHING), *kept)

    @override
    def has_flushed(self, state: State) -> bool:
        return float(state[0]) == self.FLUSHED
