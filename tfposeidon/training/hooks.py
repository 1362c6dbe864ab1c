"""Hooks of an optimizer in `fit`. Think of them as Keras callbacks that belong to the optimizer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.joining import JoinHook


def _accept(values: Sequence[Any]) -> None:
    pass


def _around_nothing(callbacks: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class FitHooks:
    """Hooks that `fit` calls for one optimizer.

    `check` refuses incompatible callbacks of the user; `first` and `last` are callbacks before and
    after those of the user, and `around` returns a context for the whole `fit`.
    """

    check: Callable[[Sequence[Any]], None] = _accept
    # Creates the variables that a step over these trainable variables needs, before it is traced.
    prepare: Callable[[list[Any]], Any] = _accept
    first: Sequence[Any] = ()
    last: Sequence[Any] = ()
    around: Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]] = _around_nothing
    # Called before and after each execution of the train function, also by `train_on_batch`;
    # `end_step` receives the execution's number of steps.
    begin_step: Callable[[], None] | None = None
    end_step: Callable[[int], None] | None = None
    # Returns the exchanges of a step, which a rank joins after it has exhausted its input.
    join_hooks: Callable[[], list[JoinHook]] = list
    # Called on all ranks where an epoch may end within an accumulated update.
    abandon_update: Callable[[], None] | None = None
    # Replaces Keras's `fit`, which it receives together with its arguments.
    run: Callable[[Any, inspect.BoundArguments], Any] | None = None
    # Returns the communicator of the ranks that train in step with this one; `None` for all.
    wire: Callable[[], Wire] | None = None
    # True if ranks exchange in each step, False if each trains local weights.
    is_in_step: bool = True
    # True if `fit` starts ranks alike, averages layer state and metrics, and compares replicas.
    synchronizes_model: bool = True
