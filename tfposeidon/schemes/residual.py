"""Schemes with a residual, the part of gradients that is not sent yet, and error feedback.

Error feedback adds elements that a selection does not send to the next gradient. It wraps the
selection and not the scheme, because in the hierarchical exchange the residual belongs to the
shard.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tfposeidon import checks, ops
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


class FeedbackState(NamedTuple):
    """State tensors of one bucket, `[n]` float32 each, or `None` where the options need none."""

    residual: tf.Tensor | None
    velocity: tf.Tensor | None

    @property
    def kept(self) -> tuple[tf.Tensor, ...]:
        """The tensors that exist, in their order."""
        return tuple(tensor for tensor in self if tensor is not None)


class Selection(NamedTuple):
    """Selected elements: `[k]` float32 values and ascending `[k]` int32 indices.

    With a residual, values are already rounded to the wire dtype and the residual holds the
    rounding error.
    """

    values: tf.Tensor
    indices: tf.Tensor


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback:
    """Selection of elements to send, with a residual of the others if `keep` is true.

    Momentum correction accumulates velocity before the selection, and masks it where elements were
    sent (Lin et al. 2018, section 3).
    """

    select: str
    wire_dtype: str | None
    keep: bool
    momentum: float

    def __post_init__(self) -> None:
        ops.check_method(self.select)
        checks.check_number("momentum", self.momentum, checks.BELOW_1, "Use 0.0 for none.")
        if self.momentum and not self.keep:
            raise ValueError(
                "Momentum correction requires error feedback. Received: "
                f"momentum={self.momentum}, error_feedback=False. Use error_feedback=True, or "
                "momentum=0.0."
            )

    def select_from(
        self,
        gradient: tf.Tensor,
        state: FeedbackState,
        k: int | tf.Tensor,
        seed: tf.Tensor | int = 0,
    ) -> tuple[Selection, FeedbackState]:
        """Selects `k` of `n` elements of the residual plus `gradient`, `[n]` float32."""
        # In all cases below, scatter(values) + new residual = residual + gradient, with the
        # velocity instead of the gradient if there is one. Without a residual, nothing can hold the
        # rounding error: values are rounded when they are sent.
        if state.residual is None:
            return Selection(*ops.top_k(gradient, k, self.select, seed=seed)), state
        options: dict[str, Any] = {
            "method": self.select,
            "wire_dtype": self.wire_dtype,
            "seed": seed,
        }
        if state.velocity is None:
            values, indices, residual = ops.error_feedback_top_k(
                state.residual, gradient, k, **options
            )
            return Selection(values, indices), FeedbackState(residual, None)
        values, indices, residual, velocity = ops.momentum_correction_top_k(
            state.residual, gradient, state.velocity, k, self.momentum, **options
        )
        return Selection(values, indices), FeedbackState(residual, velocity)

    def select_all(
        self, gradient: tf.Tensor, state: FeedbackState
    ) -> tuple[tf.Tensor, FeedbackState]:
        """Sends all elements, as if `k` were `n`, except that velocity is not masked."""
        if state.residual is None:
            return gradient, state
        if state.velocity is None:
            return state.residual + gradient, FeedbackState(tf.zeros_like(gradient), None)
        # Masking velocity compensates for delayed elements, and here none is delayed.
        velocity = self.momentum * state.velocity + gradient
        return state.residual + velocity, FeedbackState(tf.zeros_like(gradient), velocity)
