"""What an optimizer adds to `fit`. Think of callbacks of Keras that come with the optimizer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire


def _accept(callbacks: Sequence[Any]) -> None:
    pass


def _around_nothing(callbacks: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class FitHooks:
    """What `fit` does for an optimizer.

    Attributes:
      check: Refuses callbacks of the user that do not go with the optimizer.
      first: Callbacks before those of the user.
      last: Callbacks after those of the user.
      around: Function of the user's callbacks that returns a context around `fit`.
      begin_step: Called before each execution of the train function, also by `train_on_batch`.
      end_step: Called after each execution with its number of steps.
      abandon_update: Called on all ranks where an epoch may end in the middle of an update.
      run: Runs in place of Keras's `fit`, which it is given with its arguments.
      wire: Function that returns the wire between the ranks that train in step with this one.
      is_in_step: True if ranks exchange in each step, False if each trains weights of its own.
    """

    check: Callable[[Sequence[Any]], None] = _accept
    first: Sequence[Any] = ()
    last: Sequence[Any] = ()
    around: Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]] = _around_nothing
    begin_step: Callable[[], None] | None = None
    end_step: Callable[[int], None] | None = None
    abandon_update: Callable[[], None] | None = None
    run: Callable[[Any, inspect.BoundArguments], Any] | None = None
    wire: Callable[[], Wire] = runtime.wire
    is_in_step: bool = True
