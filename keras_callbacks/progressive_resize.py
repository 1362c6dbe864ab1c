"""Trains in phases at increasing resolutions, each with its own batch size, scheme and rates.

Think of a phase as one `fit`; the callback applies the phase's settings when the `fit` begins.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from typing_extensions import override

from keras_callbacks.learning_rate_schedule import LearningRateSchedule
from keras_callbacks.scheme_schedule import SchemeSchedule, check_precedes_checkpoint
from tfposeidon import checks, policies
from tfposeidon.communication import runtime
from tfposeidon.optimizers.wrapper import innermost
from tfposeidon.training import session

Rate = float | Callable[[float], float]
"""A learning rate, or a function from the fractional epoch to a learning rate."""
_RETAINED = ("scheme", "momentum", "weight_decay")
"""Settings that a phase inherits from the previous phase if it omits them."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive epochs at one image resolution, and their settings.

    Attributes:
      epochs: Number of epochs, at least 1.
      size: Width and height of the images in pixels, at least 1.
      batch: Number of samples per step on each rank, at least 1.
      scheme: Communication scheme, as for `DistributedOptimizer`; `None` retains the previous one.
      learning_rate: Rate of this phase: a number, or a function of the fractional epoch, counted
        from the start of the first phase. `None` for the rate of `ProgressiveResize`, multiplied by
        the ratio of this phase's `batch` to the first phase's (Goyal et al. 2017, section 2.1).
      momentum: Momentum of the optimizer, in [0, 1); `None` retains the previous phase's value.
      weight_decay: Weight decay of the optimizer, not negative; `None` retains the previous one.
      first_epoch: Index of the first epoch of the phase, which `ProgressiveResize` computes.

    Raises:
      ValueError: If an argument is out of its range.

    >>> Phase(epochs=13, size=96, batch=256, scheme="hitopk").end_epoch
    13
    """

    epochs: int
    size: int
    batch: int
    scheme: Any = None
    learning_rate: Rate | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    first_epoch: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "size", "batch"):
            checks.check_integer(name, getattr(self, name), 1)
        if self.learning_rate is not None and not callable(self.learning_rate):
            checks.check_number("learning_rate", self.learning_rate, checks.NOT_NEGATIVE)
        if self.momentum is not None:
            checks.check_number("momentum", self.momentum, checks.BELOW_1, "Omit to retain it.")
        if self.weight_decay is not None:
            checks.check_number("weight_decay", self.weight_decay, checks.NOT_NEGATIVE)
        if self.scheme is not None:
            policies.parse(self.scheme)

    @property
    def end_epoch(self) -> int:
        """Index of the epoch after the last epoch of the phase."""
        return self.first_epoch + self.epochs


class ProgressiveResize(LearningRateSchedule):
    """Trains in phases at increasing resolutions, with separate schemes, rates and batch sizes.

    Small images make the first epochs fast, and large images make the last epochs accurate. Each
    phase is a separate `fit` on separate data, because the number of steps per epoch depends on the
    batch size::

        resize = keras_callbacks.ProgressiveResize(phases, learning_rate=rate)
        for phase in resize.remaining(checkpoint.epoch_to_resume()):
            model.fit(
                data_of(phase),  # images of phase.size, batches of phase.batch on each rank
                initial_epoch=phase.first_epoch,
                epochs=phase.end_epoch,
                callbacks=[keras_callbacks.BroadcastVariables(), resize, checkpoint],
            )

    When a phase begins, the callback sets the optimizer's momentum and weight decay, changes the
    scheme (as `SchemeSchedule` does, without losing a residual), logs one line, and releases the
    traced step of the previous phase, so that memory does not grow with the number of phases. A
    phase traces the step once, or twice if the scheme changes. The callback sets the learning rate
    before each batch, or before each epoch if no rate is a function, with momentum correction (see
    `LearningRateSchedule`). Functions need data of known length, or `steps_per_epoch` in `fit`.

    Every rank needs this callback with the same phases. Put it before `Checkpoint`, so that a
    resumed run equals an uninterrupted one. Since each phase is a `fit`, callbacks such as
    `EarlyStopping` restart in each phase, and `use_ema` replaces weights by their averages at the
    end of each phase. `scheme="auto"` plans again in each phase, because the compute time changes.

    Args:
      phases: Phases in order, at least one.
      learning_rate: Rate for the batch size of the first phase: a number, or a function of the
        fractional epoch, such as `lambda epoch: 8.0 * (1 - epoch / 28) ** 2`. Optional if each
        phase has its own.
      momentum_correction: True (default) to multiply the velocity by the ratio of new to old rate;
        see `LearningRateSchedule`.

    Attributes:
      phases: The phases, with their first epochs and with retained settings.

    Raises:
      ValueError: If there is no phase, if a later phase has a scheme, momentum or weight decay and
        the first phase has none, or if a phase has no rate. In `fit`, if the `fit` extends beyond
        its phase, if the optimizer was created without a setting of the phase, if the model has
        several optimizers, or if `Checkpoint` precedes this callback.

    Source: Shi et al. 2021 (CommLib), section 5.6 and table 4.

    >>> import keras_callbacks
    >>> resize = keras_callbacks.ProgressiveResize(
    ...     [
    ...         keras_callbacks.Phase(epochs=13, size=96, batch=256, scheme="hitopk"),
    ...         keras_callbacks.Phase(epochs=11, size=128, batch=256, scheme="torus2d"),
    ...         keras_callbacks.Phase(epochs=3, size=224, batch=256),
    ...         keras_callbacks.Phase(epochs=1, size=288, batch=128),
    ...     ],
    ...     learning_rate=lambda epoch: 8.0 * (1.0 - epoch / 28) ** 2,
    ... )
    >>> [(phase.size, phase.first_epoch, phase.end_epoch) for phase in resize.phases]
    [(96, 0, 13), (128, 13, 24), (224, 24, 27), (288, 27, 28)]
    >>> resize.rate_at(14.0), resize.rate_at(27.0)  # half the batch, half the rate
    (2.0, 0.00510...)
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        learning_rate: Rate | None = None,
        momentum_correction: bool = True,
    ) -> None:
        self.phases = _completed(phases)
        if learning_rate is not None and not callable(learning_rate):
            checks.check_number("learning_rate", learning_rate, checks.NOT_NEGATIVE)
        _check_settings(self.phases, learning_rate)
        self._learning_rate = learning_rate
        self._phase: Phase | None = None
        # Change the rate within epochs only for functions: such changes require a known length.
        is_constant = not any(map(callable, (learning_rate, *(p.learning_rate for p in phases))))
        super().__init__(
            1.0, self.rate_at, staircase=is_constant, momentum_correction=momentum_correction
        )
        self._schemes = keras.callbacks.Callback()
        if self.phases[0].scheme is not None:
            changes = itertools.groupby(self.phases, lambda phase: phase.scheme)
            schemes = {next(phases).first_epoch: scheme for scheme, phases in changes}
            self._schemes = SchemeSchedule(schemes, verbose=False)

    def rate_at(self, epoch: float) -> float:
        """Returns the learning rate at an epoch.

        Args:
          epoch: Fractional epoch, from 0.

        Returns:
          Learning rate for the batch size of the epoch's phase.

        Raises:
          ValueError: If the epoch follows the last phase.
        """
        phase = self.phase_at(int(epoch))
        rate, factor = phase.learning_rate, 1.0
        if rate is None:
            assert self._learning_rate is not None
            rate, factor = self._learning_rate, phase.batch / self.phases[0].batch
        return factor * float(rate(epoch) if callable(rate) else rate)

    def phase_at(self, epoch: int) -> Phase:
        """Returns the phase of an epoch.

        Args:
          epoch: Index of the epoch, from 0.

        Returns:
          The phase that contains the epoch.

        Raises:
          ValueError: If the epoch follows the last phase.
        """
        for phase in self.phases:
            if epoch < phase.end_epoch:
                return phase
        raise ValueError(
            f"Epochs must be within the phases, 0 to {self.phases[-1].end_epoch - 1}. Received: "
            f"epoch {epoch}. Train with fit(..., epochs=phase.end_epoch), or add a phase."
        )

    def remaining(self, epoch: int = 0) -> list[Phase]:
        """Returns the remaining phases, including the phase in progress.

        Args:
          epoch: Index of the epoch to resume at (default 0); see `Checkpoint.epoch_to_resume`.

        Returns:
          Phases in order. If training is complete, only the last phase, whose `fit` restores the
          model without training.
        """
        return [phase for phase in self.phases if phase.end_epoch > epoch] or [self.phases[-1]]

    # --------------------------------------------------------------- callback

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        check_precedes_checkpoint(self)
        super().on_train_begin(logs)
        self._schemes.set_model(self.model)
        self._schemes.set_params(self.params)
        self._schemes.on_train_begin(logs)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        phase = self.phase_at(epoch)
        if self.params["epochs"] > phase.end_epoch:
            raise ValueError(
                f"All epochs of a `fit` must belong to one phase. Received: epochs {epoch} to "
                f"{self.params['epochs'] - 1}, but the phase of {phase.size} pixels ends with "
                f"epoch {phase.end_epoch - 1}. Call `fit` for each phase that remaining() returns. "
                "After a phase that stopped early, call remaining() again."
            )
        if phase is not self._phase:
            self._begin(phase)
            current = session.of(self.model)
            if epoch == phase.first_epoch and not current.is_skipping:
                current.forget_steps()
        super().on_epoch_begin(epoch, logs)
        self._schemes.on_epoch_begin(epoch, logs)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._schemes.on_train_batch_end(batch, logs)

    def _begin(self, phase: Phase) -> None:
        """Sets the optimizer's settings, and releases the traced step of the previous phase."""
        self._phase = phase
        for name in ("momentum", "weight_decay"):
            if (value := getattr(phase, name)) is not None:
                _set(innermost(self.optimizer), name, value)
        session.of(self.model).retrace()
        # Graphs contain reference cycles, so only the garbage collector releases their memory.
        gc.collect()
        first, last = phase.first_epoch, phase.end_epoch - 1
        runtime.log_once(
            "tfposeidon: phase %d of %d: epochs %d to %d, %d pixels, batches of %d on each rank, "
            "learning rate %.3g to %.3g%s.",
            self.phases.index(phase) + 1,
            len(self.phases),
            first,
            last,
            phase.size,
            phase.batch,
            self.rate_at(first),
            self.rate_at(last + 1 - 1e-6),
            "" if phase.scheme is None else f", scheme {policies.parse(phase.scheme)}",
        )


def _completed(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Returns phases with their first epochs, and with omitted settings from earlier phases."""
    found: list[Phase] = []
    for phase in phases:
        omitted = [name for name in _RETAINED if found and getattr(phase, name) is None]
        retained: dict[str, Any] = {name: getattr(found[-1], name) for name in omitted}
        first_epoch = found[-1].end_epoch if found else 0
        found.append(dataclasses.replace(phase, first_epoch=first_epoch, **retained))
    if not found:
        raise ValueError(
            f"`phases` must contain at least one phase. Received: phases={phases!r}. Add a "
            "Phase(...)."
        )
    return tuple(found)


def _check_settings(phases: Sequence[Phase], rate: Rate | None) -> None:
    if rate is None and (missing := [p.size for p in phases if p.learning_rate is None]):
        raise ValueError(
            "Each phase must have a learning rate. Received: learning_rate=None for the phase of "
            f"{missing[0]} pixels. Pass learning_rate to ProgressiveResize, or to each Phase."
        )
    for name in _RETAINED:
        later = [phase for phase in phases if getattr(phase, name) is not None]
        if later and later[0] is not phases[0]:
            raise ValueError(
                f"If a later phase sets `{name}`, the first phase must set it, too. "
                f"Received: {name}={getattr(later[0], name)!r} from epoch {later[0].first_epoch} "
                f"on. Pass {name} to the first Phase."
            )


def _set(optimizer: Any, name: str, value: float) -> None:
    """Sets an attribute that the optimizer reads while a step is traced."""
    before = getattr(optimizer, name, None)
    # Keras creates velocities when an optimizer is built, and only if it has momentum.
    if before is None or (name == "momentum" and bool(before) != bool(value)):
        raise ValueError(
            f"A phase can set `{name}` only if the optimizer was created with it. "
            f"Received: {name}={value} for {type(optimizer).__name__} with {name}={before}. "
            f"Create the optimizer with {name}={value}."
        )
    setattr(optimizer, name, value)
