"""Learning rate schedules that Keras does not have: polynomial with warm-up, cosine in epochs."""

from __future__ import annotations

from typing import Any, Self

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon.checks import NOT_NEGATIVE, POSITIVE, Range, check_integer, check_number


@keras.saving.register_keras_serializable(package="tfposeidon")
class PolynomialDecayWithWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """Learning rate with linear warm-up and polynomial decay, common with LARS and LAMB.

    At step s = 0, 1, 2, ..., with k = s - warmup_steps::

        rate = initial + (peak - initial) s / warmup_steps              for s < warmup_steps
        rate = end + (peak - end) (1 - min(k, decay_steps) / decay_steps)^power    afterwards

    The peak is reached at step `warmup_steps`, and the end at `warmup_steps + decay_steps`. With
    the default `initial_learning_rate`, the first step has rate 0 and changes nothing, as in
    Keras's `CosineDecay`.

    Steps are counted by the optimizer, which with `gradient_accumulation_steps` counts every batch.

    Args:
      peak_learning_rate: Rate at the end of the warm-up, above 0.
      warmup_steps: Number of steps of the warm-up, 0 or more.
      decay_steps: Number of steps of the decay after the warm-up, 1 or more.
      initial_learning_rate: Rate at step 0, from 0 (default) to the peak.
      end_learning_rate: Rate after all steps, from 0 (default) to the peak.
      power: Exponent of the decay, above 0: 1 is linear, 2 (default) is common with LARS.
      name: Name of the schedule and of its operations.

    Raises:
      ValueError: If an argument is not in its range.

    Source: Goyal et al. 2017, section 2.2, for the warm-up; You, Gitman and Ginsburg 2017, section
    5, for the decay.

    >>> schedule = PolynomialDecayWithWarmup(8.0, warmup_steps=4, decay_steps=10)
    >>> [float(schedule(step)) for step in (0, 2, 4, 9, 14, 99)]
    [0.0, 4.0, 8.0, 2.0, 0.0, 0.0]
    """

    def __init__(
        self,
        peak_learning_rate: float,
        warmup_steps: int,
        decay_steps: int,
        *,
        initial_learning_rate: float = 0.0,
        end_learning_rate: float = 0.0,
        power: float = 2.0,
        name: str = "PolynomialDecayWithWarmup",
    ) -> None:
        self.peak_learning_rate = check_number(
            "peak_learning_rate", peak_learning_rate, POSITIVE, "Use for example 1.0."
        )
        self.warmup_steps = check_integer(
            "warmup_steps", warmup_steps, 0, "Use 0 for none, or by_epochs."
        )
        self.decay_steps = check_integer(
            "decay_steps", decay_steps, 1, "Pass the number of steps after the warm-up."
        )
        self.initial_learning_rate = self._up_to_peak(
            "initial_learning_rate", initial_learning_rate
        )
        self.end_learning_rate = self._up_to_peak("end_learning_rate", end_learning_rate)
        self.power = check_number("power", power, POSITIVE, "Use 1 for a straight line.")
        self.name = name

    @classmethod
    def by_epochs(
        cls,
        peak_learning_rate: float,
        warmup_epochs: float,
        decay_epochs: float,
        steps_per_epoch: int,
        **options: Any,
    ) -> Self:
        """Creates a schedule from lengths in epochs, which may be fractional.

        Args:
          peak_learning_rate: Rate at the end of the warm-up, above 0.
          warmup_epochs: Number of epochs of the warm-up, 0 or more.
          decay_epochs: Number of epochs of the decay after the warm-up, above 0.
          steps_per_epoch: Number of steps of one rank, `ceil(samples / (batch_size * ranks))`.
          **options: Further arguments of the constructor.

        Returns:
          Schedule with lengths in steps: epochs times `steps_per_epoch`, rounded.

        Raises:
          ValueError: If an argument is not in its range.

        >>> PolynomialDecayWithWarmup.by_epochs(1.0, 2.5, 37.5, steps_per_epoch=100).decay_steps
        3750
        """
        warmup_steps, decay_steps = _in_steps(warmup_epochs, decay_epochs, steps_per_epoch)
        return cls(peak_learning_rate, warmup_steps, decay_steps, **options)

    @override
    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate at a step.

        Args:
          step: Index of the step, an integer scalar from 0.

        Returns:
          Scalar of dtype `keras.config.floatx()`.
        """
        dtype = keras.config.floatx()
        with tf.name_scope(self.name):
            since_peak = tf.cast(step, dtype) - self.warmup_steps
            left = 1.0 - tf.clip_by_value(since_peak / self.decay_steps, 0.0, 1.0)
            peak, end = self.peak_learning_rate, self.end_learning_rate
            decayed = end + (peak - end) * left**self.power
            # Avoid a division by 0 without a warm-up. No step then precedes the peak, and this
            # value is not used.
            rise = (peak - self.initial_learning_rate) * since_peak / max(1, self.warmup_steps)
            return tf.where(since_peak < 0.0, peak + rise, decayed)

    @override
    def get_config(self) -> dict[str, Any]:
        # All attributes are arguments of the constructor.
        return dict(vars(self))

    def _up_to_peak(self, name: str, value: Any) -> float:
        peak = self.peak_learning_rate
        rule = Range(f"a number in [0, peak_learning_rate={peak}]", lambda x: 0.0 <= x <= peak)
        return check_number(name, value, rule, "Use 0.0, or a higher peak.")


def cosine_decay_by_epochs(
    peak_learning_rate: float,
    warmup_epochs: float,
    decay_epochs: float,
    steps_per_epoch: int,
    **options: Any,
) -> keras.optimizers.schedules.CosineDecay:
    """Creates a `keras.optimizers.schedules.CosineDecay` from lengths in epochs.

    The rate rises linearly from 0 to the peak, then falls along a cosine. Epochs may be fractional.

    Args:
      peak_learning_rate: Rate at the end of the warm-up, above 0.
      warmup_epochs: Number of epochs of the warm-up, 0 or more.
      decay_epochs: Number of epochs of the decay after the warm-up, above 0.
      steps_per_epoch: Number of steps of one rank, `ceil(samples / (batch_size * ranks))`.
      **options: Options of `keras.optimizers.schedules.CosineDecay`: alpha, name.

    Returns:
      Schedule with lengths in steps: epochs times `steps_per_epoch`, rounded.

    Raises:
      ValueError: If an argument is not in its range.

    >>> schedule = cosine_decay_by_epochs(8.0, warmup_epochs=2, decay_epochs=3, steps_per_epoch=2)
    >>> [round(float(schedule(step)), 3) for step in (0, 2, 4, 7, 10)]
    [0.0, 4.0, 8.0, 4.0, 0.0]
    """
    peak = check_number("peak_learning_rate", peak_learning_rate, POSITIVE, "Use for example 1.0.")
    warmup_steps, decay_steps = _in_steps(warmup_epochs, decay_epochs, steps_per_epoch)
    cosine = keras.optimizers.schedules.CosineDecay
    if not warmup_steps:
        return cosine(peak, decay_steps, **options)
    return cosine(0.0, decay_steps, warmup_target=peak, warmup_steps=warmup_steps, **options)


def _in_steps(warmup_epochs: Any, decay_epochs: Any, steps_per_epoch: Any) -> tuple[int, int]:
    steps = check_integer(
        "steps_per_epoch", steps_per_epoch, 1, "Pass the number of batches of one rank."
    )
    warmup = check_number("warmup_epochs", warmup_epochs, NOT_NEGATIVE, "Use 0 for none.")
    decay = check_number(
        "decay_epochs", decay_epochs, POSITIVE, "Pass the number of epochs after the warm-up."
    )
    # A decay of less than half a step still takes one step, so that the rate falls.
    return round(warmup * steps), max(1, round(decay * steps))
