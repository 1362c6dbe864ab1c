"""Defines hooks of an optimizer in `fit`, and train functions that replace a model's own.

Think of hooks as Keras callbacks that belong to the optimizer. Keras calls `model.train_function`
for each execution, so a replacement can drop batches or retrace.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.means import JoinHook


@dataclass(frozen=True, kw_only=True)
class FitHooks:
    """Hooks that `fit` calls for one optimizer.

    Attributes:
      check: Refuses incompatible callbacks of the user.
      prepare: Creates variables that a step with these trainable variables needs, before its trace.
      first: Callbacks that run before the user's callbacks.
      last: Callbacks that run after the user's callbacks.
      around: Returns a context for the whole `fit`.
      begin_step: Is called before each execution of the train function, also by `train_on_batch`.
      end_step: Is called after each such execution with its number of steps.
      join_hooks: Returns the exchanges of a step, which a rank with exhausted input joins.
      abandon_update: Is called on all ranks when an epoch may end within an accumulated update.
      run: Replaces Keras's `fit`, which it receives together with its arguments.
      wire: Returns the communicator of the ranks in step with this one; `None` for all ranks.
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


class SkipBatches:
    """Train function that drops the first batches of an epoch instead of training on them.

    Keras has no hook between reading a batch and training on it. After the last dropped batch, the
    model's own train function is restored. `batches` must be a multiple of `steps_per_execution`.
    """

    def __init__(self, model: keras.Model, batches: int) -> None:
        self.model = model
        self.remaining = batches
        self.train: Callable[[Any], Any] = model.train_function

    def __call__(self, iterator: Any) -> Any:
        if self.remaining <= 0:
            self.model.train_function = self.train
            return self.train(iterator)
        steps = self.model.steps_per_execution
        dropped = sum(1 for _ in itertools.islice(iterator, steps))
        # The last execution of an epoch may be shorter.
        self.remaining = self.remaining - steps if dropped == steps else 0
        if not dropped:
            raise StopIteration
        if self.remaining <= 0:
            # Metrics that are not built have no result.
            with contextlib.suppress(ValueError):
                # Return the metrics of the snapshot, which are final if no batches are left.
                return self.model.get_metrics_result()
        return {}


class OutsideOfFit:
    """Train function that retraces the step for batches outside of a `fit` with equal batches.

    The next `fit` restores the model's own train function, which need not be traced again.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.train: Callable[[Any], Any] = model.train_function

    def __call__(self, iterator: Any) -> Any:
        self.model.make_train_function(force=True)
        return self.model.train_function(iterator)
