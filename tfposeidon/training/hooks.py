"""Defines the hooks of an optimizer in `fit`, which work like callbacks of the optimizer itself."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.means import JoinHook


@dataclass(frozen=True, kw_only=True)
class FitHooks:
    """Hooks that `fit` calls for one optimizer.

    Attributes:
      check: Raises an error for incompatible callbacks or settings of the user.
      prepare: Creates variables that a step with these trainable variables needs, before its trace.
      first: Callbacks that run before the user's callbacks.
      last: Callbacks that run after the user's callbacks.
      around: Returns a context for the whole `fit`.
      begin_step: Called before each execution of the train function, also in `train_on_batch`.
      end_step: Called after each such execution, with its number of steps.
      join_hooks: Returns the exchanges of a step, which a rank with exhausted input joins.
      abandon_update: Called on all ranks when an epoch may end within an accumulated update.
      run: Replaces Keras's `fit`, which it receives together with its arguments.
      wire: Returns the communicator of the ranks that exchange in each step; `None` for all ranks.
      is_in_step: True if ranks exchange in each step, False if each rank trains local weights.
      synchronizes_model: True if `fit` starts all ranks with equal values, averages layer state and
        metrics, and compares replicas.
    """

    check: Callable[[Sequence[Any]], None] = lambda callbacks: None
    prepare: Callable[[list[Any]], Any] = lambda variables: None
    first: Sequence[Any] = ()
    last: Sequence[Any] = ()
    around: Callable[[Sequence[Any]], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )
    begin_step: Callable[[], None] | None = None
    end_step: Callable[[int], None] | None = None
    join_hooks: Callable[[], list[JoinHook]] = list
    abandon_update: Callable[[], None] | None = None
    run: Callable[[Any, inspect.BoundArguments], Any] | None = None
    wire: Callable[[], Wire] | None = None
    is_in_step: bool = True
    synchronizes_model: bool = True
