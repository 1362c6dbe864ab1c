"""Error feedback: what a selection leaves behind is added to the next gradient, so none is lost.

It wraps the selection and not the scheme: in the hierarchical exchange the residual is that of the
shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon import ops, ranges


class FeedbackState(NamedTuple):
    """Tensors that last from step to step: `[n]` float32 each, `None` where not kept."""

    residual: tf.Tensor | None
    velocity: tf.Tensor | None

    @property
    def kept(self) -> tuple[tf.Tensor, ...]:
        """The tensors that are kept, in their order."""
        return tuple(tensor for tensor in self if tensor is not None)


class Selection(NamedTuple):
    """Elements that were selected to be sent.

    Attributes:
      values: Selected values, `[k]` float32; rounded to the wire's type where there is a residual,
        which takes the rounding error.
      indices: Indices of these values, `[k]` int32, ascending.
    """

    values: tf.Tensor
    indices: tf.Tensor


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback:
    """Selection of elements to send, with a residual of the others.

    Args:
      select: Method of selection; see `tfposeidon.ops.top_k`.
      wire_dtype: Type that values are rounded to; the rounding error stays in the residual.
      keep: True for a residual. Without one, what is not sent is lost.
      momentum: Coefficient of momentum correction, 0 for none: velocity is accumulated before
        selection, and masked where something was sent (Lin et al. 2018, section 3).

    Raises:
      ValueError: If `select` is unknown, `momentum` is not in [0, 1), or there is momentum without
        a residual.
    """

    select: str
    wire_dtype: str | None
    keep: bool
    momentum: float

    def __post_init__(self) -> None:
        ops.check_method(self.select)
        ranges.check_number("momentum", self.momentum, ranges.BELOW_1, "Use 0.0 for none.")
        if self.momentum and not self.keep:
            raise ValueError(
                f"Momentum correction needs error feedback. Received: momentum={self.momentum}, "
                "error_feedback=False. Use error_feedback=True, or momentum=0.0."
            )

    def select_from(
        self,
        gradient: tf.Tensor,
        state: FeedbackState,
        k: int | tf.Tensor,
        seed: tf.Tensor | int = 0,
    ) -> tuple[Selection, FeedbackState]:
        """Selects `k` elements of the residual plus `gradient`.

        Args:
          gradient: Gradient, `[n]` float32.
          state: State of this rank.
          k: Number of elements, from 0 to `n`.
          seed: Seed of MSTopK's random window; other methods have none.

        Returns:
          The elements to send, and the new state: `scatter(values) + new residual = residual +
          gradient`, with the velocity in place of the gradient if there is one.
        """
        # Nothing would take the rounding error here: values are rounded on their way to the wire.
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
        """Sends all elements, as if `k` were `n`, except that velocity is kept.

        Args:
          gradient: Gradient, `[n]` float32.
          state: State of this rank.

        Returns:
          The residual plus the gradient (or the velocity), `[n]` float32, and the new state, whose
          residual is zero.
        """
        if state.residual is None:
            return gradient, state
        if state.velocity is None:
            return state.residual + gradient, FeedbackState(tf.zeros_like(gradient), None)
        # Velocity is masked where elements were late, and here none was.
        velocity = self.momentum * state.velocity + gradient
        return state.residual + velocity, FeedbackState(tf.zeros_like(gradient), velocity)
