"""Trains in phases at growing resolutions, each with its own batch, scheme and rates."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from typing_extensions import override

from keras_callbacks.learning_rate_schedule import LearningRateSchedule
from keras_callbacks.scheme_schedule import SchemeSchedule
from tfposeidon import policies, ranges
from tfposeidon.communication import runtime
from tfposeidon.optimizers.wrapping import innermost
from tfposeidon.training import session
from tfposeidon.training.entries import optimizers

Rate = float | Callable[[float], float]
"""A learning rate, or a function from the epoch, with its fraction, to one."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Epochs that are trained at one resolution.

    Attributes:
      epochs: Number of epochs, from 1.
      size: Side of the images in pixels, from 1.
      batch: Samples of a step on each rank, from 1.
      scheme: Communication scheme, as `DistributedOptimizer` takes it; `None` keeps that of the
        phase before.
      learning_rate: Rate of this phase: a number, or a function of the epoch, which counts from the
        first phase. `None` for the rate that `ProgressiveResize` was given, times this batch over
        that of the first phase (Goyal et al. 2017, section 2.1).
      momentum: Momentum of the optimizer, in [0, 1); `None` keeps that of the phase before.
      weight_decay: Weight decay of the optimizer, from 0; `None` keeps that of the phase before.
      first_epoch: Index of its first epoch, which `ProgressiveResize` counts.

    Raises:
      ValueError: If an argument is not in its range.

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
            ranges.check_integer(name, getattr(self, name), 1)
        if self.learning_rate is not None and not callable(self.learning_rate):
            ranges.check_number("learning_rate", self.learning_rate, ranges.NOT_NEGATIVE)
        if self.momentum is not None:
            ranges.check_number("momentum", self.momentum, ranges.BELOW_1, "Leave it out to keep.")
        if self.weight_decay is not None:
            ranges.check_number("weight_decay", self.weight_decay, ranges.NOT_NEGATIVE)
        if self.scheme is not None:
            policies.parse(self.scheme)

    @property
    def end_epoch(self) -> int:
        """Index of the epoch after its last one."""
        return self.first_epoch + self.epochs


class ProgressiveResize(keras.callbacks.Callback):
    """Trains in phases at growing resolutions, with the scheme, the rates and the batch of each.

    Small images train fast in the first epochs, large ones accurately in the last. Each phase is a
    `fit` of its own, on its own data, as the number of steps in an epoch changes with the batch::

        resize = keras_callbacks.ProgressiveResize(phases, learning_rate=rate)
        for phase in resize.remaining(checkpoint.epoch_to_resume()):
            model.fit(
                data_of(phase),  # images of phase.size, batches of phase.batch on each rank
                initial_epoch=phase.first_epoch,
                epochs=phase.end_epoch,
                callbacks=[keras_callbacks.BroadcastVariables(), resize, checkpoint],
            )

    When a phase begins, the callback sets the optimizer's momentum and weight decay, changes the
    scheme (as `SchemeSchedule` does, without losing a residual), prints one line, and lets go of
    the step that was traced for the phase before, so that memory does not grow with the phases. A
    phase traces the step once, and twice where the scheme changes, too. The learning rate is set
    before each batch, or before each epoch where no rate is a function, with momentum correction:
    see `LearningRateSchedule`. Functions need data that tell their length, or `steps_per_epoch` in
    `fit`.

    Every rank needs this callback with the same phases. Put it before `Checkpoint`: a run that is
    resumed in any phase equals one that was not interrupted. What Keras does in each `fit` is done
    in each phase: callbacks such as `EarlyStopping` begin anew, and with `use_ema` weights become
    their averages at its end. `scheme="auto"` plans again in each phase, as it computes longer.

    Args:
      phases: Phases in their order, one or more.
      learning_rate: Rate for the batch of the first phase: a number, or a function of the epoch
        with its fraction, such as `lambda epoch: 8.0 * (1 - epoch / 28) ** 2`. It may be left out
        where each phase has its own.
      momentum_correction: True to multiply the velocity by the change of the rate; see
        `LearningRateSchedule`.

    Attributes:
      phases: The phases, with the epochs at which they begin.

    Raises:
      ValueError: If there is no phase, if some phases have a scheme or a momentum and the first has
        none, or if a phase has no rate. In `fit`, if it goes beyond the phase of its epoch, if the
        optimizer has no such setting, if the model has several optimizers, or if `Checkpoint` comes
        before this callback.

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
        super().__init__()
        self.phases = _counted(phases)
        if learning_rate is not None and not callable(learning_rate):
            ranges.check_number("learning_rate", learning_rate, ranges.NOT_NEGATIVE)
        _check_every_phase_knows_its_rate(self.phases, learning_rate)
        for name in ("scheme", "momentum", "weight_decay"):
            _check_first_phase_has(name, self.phases)
        self._learning_rate = learning_rate
        self._phase: Phase | None = None
        # Within an epoch only functions change, for which its length has to be known.
        is_constant = not any(map(callable, (learning_rate, *(p.learning_rate for p in phases))))
        self._callbacks: list[keras.callbacks.Callback] = [
            LearningRateSchedule(
                1.0, self.rate_at, staircase=is_constant, momentum_correction=momentum_correction
            )
        ]
        if self.phases[0].scheme is not None:
            schemes = {p.first_epoch: p.scheme for p in self.phases if p.scheme is not None}
            self._callbacks.append(SchemeSchedule(schemes, verbose=False))

    def rate_at(self, epoch: float) -> float:
        """Returns the learning rate at an epoch.

        Args:
          epoch: Epoch with its fraction, from 0.
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

        Raises:
          ValueError: If it comes after the last phase.
        """
        for phase in self.phases:
            if epoch < phase.end_epoch:
                return phase
        raise ValueError(
            f"Epochs must be those of the phases, 0 to {self.phases[-1].end_epoch - 1}. Received: "
            f"epoch {epoch}. Train with fit(..., epochs=phase.end_epoch), or add a phase."
        )

    def remaining(self, epoch: int = 0) -> list[Phase]:
        """Returns the phases that are still to be trained, the one in progress included.

        Args:
          epoch: Index of the epoch to go on with, as `Checkpoint.epoch_to_resume` tells it.

        Returns:
          Phases in their order. Where training is complete, it is the last one: its `fit` then
          restores the model, and trains nothing.
        """
        return [phase for phase in self.phases if phase.end_epoch > epoch] or [self.phases[-1]]

    # --------------------------------------------------------------- callback

    @override
    def set_params(self, params: Any) -> None:
        super().set_params(params)
        for callback in self._callbacks:
            callback.set_params(params)

    @override
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        for callback in self._callbacks:
            callback.set_model(model)

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._session = session.of(self.model)
        if self._session.is_resumed:
            raise ValueError(
                "ProgressiveResize must come before Checkpoint in the list of callbacks. Received: "
                "after it."
            )
        if len(optimizers(self.model)) > 1:
            raise ValueError(
                "ProgressiveResize sets the rate of one optimizer. Received: a model with "
                f"{len(optimizers(self.model))}. Set rates by a LearningRateSchedule for each, and "
                "schemes by a SchemeSchedule."
            )
        for callback in self._callbacks:
            callback.on_train_begin(logs)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        phase = self.phase_at(epoch)
        if self.params["epochs"] > phase.end_epoch:
            raise ValueError(
                f"A `fit` must end with the phase of its epochs. Received: epoch {epoch}, of the "
                f"phase of {phase.size} pixels up to epoch {phase.end_epoch - 1}, in a fit up to "
                f"epoch {self.params['epochs'] - 1}. Train phase by phase what remaining() "
                "returns; after a phase that has stopped early, ask for it again."
            )
        if phase is not self._phase:
            self._begin(phase)
            if epoch == phase.first_epoch and not self._session.is_skipping:
                self._session.forget_times()
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch, logs)

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for callback in self._callbacks:
            callback.on_train_batch_begin(batch, logs)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for callback in self._callbacks:
            callback.on_train_batch_end(batch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)

    def _begin(self, phase: Phase) -> None:
        """Sets what the traced step holds, and lets go of the step of the phase before."""
        self._phase = phase
        for name in ("momentum", "weight_decay"):
            value = self._kept(name, phase)
            if value is not None:
                for optimizer in optimizers(self.model):
                    _set(innermost(optimizer), name, value)
        self._session.retrace()
        # Graphs refer to themselves, so that memory is not free before they are collected.
        gc.collect()
        runtime.say("tfposeidon: %s", self._line(phase))

    def _kept(self, name: str, phase: Phase) -> Any:
        """Returns what a phase sets or keeps of those before it; `None` if none of them sets it."""
        before = [p for p in self.phases if p.first_epoch <= phase.first_epoch]
        known = [value for p in before if (value := getattr(p, name)) is not None]
        return known[-1] if known else None

    def _line(self, phase: Phase) -> str:
        first, last = phase.first_epoch, phase.end_epoch - 1
        rates = [self.rate_at(first), self.rate_at(last + 1 - 1e-6)]
        scheme = self._kept("scheme", phase)
        return (
            f"phase {self.phases.index(phase) + 1} of {len(self.phases)}: epochs {first} to "
            f"{last}, {phase.size} pixels, batches of {phase.batch} on each rank, rate "
            f"{rates[0]:.3g} to {rates[1]:.3g}"
            f"{'' if scheme is None else f', by {policies.parse(scheme)}'}."
        )


def _counted(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Returns the phases with the epochs at which they begin."""
    found: list[Phase] = []
    for phase in phases:
        begin = found[-1].end_epoch if found else 0
        found.append(dataclasses.replace(phase, first_epoch=begin))
    if not found:
        raise ValueError("`phases` must have one phase or more. Received: none. Add a Phase(...).")
    return tuple(found)


def _check_every_phase_knows_its_rate(phases: Sequence[Phase], rate: Rate | None) -> None:
    if rate is None and (missing := [p.size for p in phases if p.learning_rate is None]):
        raise ValueError(
            "Each phase must know its learning rate. Received: none for the phase of "
            f"{missing[0]} pixels. Give ProgressiveResize a learning_rate, or each Phase one."
        )


def _check_first_phase_has(name: str, phases: Sequence[Phase]) -> None:
    later = [phase for phase in phases if getattr(phase, name) is not None]
    if later and later[0] is not phases[0]:
        raise ValueError(
            f"Where `{name}` changes, the first phase must say what it is at the beginning. "
            f"Received: {name}={getattr(later[0], name)!r} from epoch {later[0].first_epoch} on. "
            f"Give the first Phase a {name}."
        )


def _set(optimizer: Any, name: str, value: float) -> None:
    """Sets what an optimizer's rule reads when a step is traced."""
    before = getattr(optimizer, name, None)
    # Velocities are made when an optimizer is built, and only if it has momentum.
    is_possible = before is not None and (name != "momentum" or bool(before) == bool(value))
    if not is_possible:
        raise ValueError(
            f"A phase can set `{name}` only where the optimizer has it from the beginning. "
            f"Received: {name}={value} for {type(optimizer).__name__} with {name}={before}. "
            f"Make the optimizer with {name}={value}."
        )
    setattr(optimizer, name, value)
