"""What Keras's `compile` and `fit` have to know of a `DistributedOptimizer`.

Keras gives an optimizer no way to see the model it trains. So the first `DistributedOptimizer` of a
process teaches `keras.Model` four things, for models that are compiled with one:

- `compile`: `jit_compile="auto"` means no XLA; under `mixed_float16` the loss scale goes inside.
- `train_step`: how many samples the batch has, so that unequal batches are weighed right.
- `fit`: only rank 0 shows a progress bar, unless `verbose` is given.
- `fit`: epochs have as many steps as the rank with the fewest batches, and end on all ranks.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfposeidon import runtime
from tfposeidon.wire import exchange_objects


def teach_keras() -> None:
    """Wraps `compile` and `fit` of `keras.Model`; the second call does nothing."""
    for name, replacement in (("compile", _compile), ("fit", _fit)):
        # Where Keras defines them: it takes a compile on a lower class for the user's own.
        home = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
        if not hasattr(getattr(home, name), "_tfposeidon"):
            setattr(home, name, _wrapped(getattr(home, name), replacement))


def _wrapped(original: Any, replacement: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, signature.bind(self, *args, **kwargs))

    method._tfposeidon = True  # type: ignore[attr-defined]
    return method


def _is_ours(optimizer: Any) -> bool:
    # Imported late: the optimizer imports this module.
    from tfposeidon.optimizer import DistributedOptimizer

    return isinstance(optimizer, DistributedOptimizer)


def _compile(original: Any, call: inspect.BoundArguments) -> Any:
    call.apply_defaults()
    model, arguments = call.arguments["self"], call.arguments
    optimizer = arguments["optimizer"]
    if _is_ours(getattr(optimizer, "inner_optimizer", None)):
        raise ValueError(
            "DistributedOptimizer must be the outermost optimizer. Received: a "
            f"{type(optimizer).__name__} around it. Write DistributedOptimizer(LossScaleOptimizer(optimizer))."
        )
    if not _is_ours(optimizer):
        return original(*call.args, **call.kwargs)
    auto = arguments["jit_compile"] == "auto" and not arguments["run_eagerly"]
    if arguments["auto_scale_loss"] and model.dtype_policy.name == "mixed_float16":
        optimizer.scale_losses()
    result = original(*call.args, **call.kwargs)
    if auto and model.jit_compile and runtime.size() > 1:
        model.jit_compile = False
        runtime.say("tfposeidon: XLA is off for this model's steps, because it cannot compile collectives.")
    _count_samples(model)
    return result


def _count_samples(model: Any) -> None:
    step = model.train_step
    if hasattr(step, "_tfposeidon"):
        return

    @functools.wraps(step)
    def train_step(data: Any) -> Any:
        if not _is_ours(model.optimizer):
            return step(data)
        with model.optimizer.counting(_batch_size(data)):
            return step(data)

    train_step._tfposeidon = True  # type: ignore[attr-defined]
    model.train_step = train_step


def _batch_size(data: Any) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    return tf.shape(leaves[0])[0]


def _fit(original: Any, call: inspect.BoundArguments) -> Any:
    model = call.arguments["self"]
    if not _is_ours(getattr(model, "optimizer", None)):
        return original(*call.args, **call.kwargs)
    call.apply_defaults()
    if call.arguments["verbose"] == "auto" and runtime.rank() != 0:
        call.arguments["verbose"] = 0
    _build(model, *(call.arguments[name] for name in ("x", "y", "sample_weight")))
    callbacks = call.arguments["callbacks"]
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        # Before all others, because they may communicate at the end of an epoch; after all others,
        # because they may ask to stop.
        call.arguments["callbacks"] = [EqualSteps(), *keras.tree.flatten(callbacks or []), EqualEnd()]
    with warnings.catch_warnings():
        # Keras's advice for epochs that end early is wrong where another rank has fewer batches; we log that.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        return original(*call.args, **call.kwargs)


def _build(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> None:
    """Builds model, metrics and optimizer before callbacks broadcast or restore them.

    Keras on TensorFlow leaves that to the first step. Generators cannot be looked at without taking a
    batch from them; callbacks that need a built model then say so.
    """
    specification = _specification(x, y, sample_weight)
    if specification is None:
        return
    try:
        model._symbolic_build(data_batch=specification)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        # What Keras can train need not be something that it can build from shapes alone.
        runtime.say("tfposeidon: the model builds itself in its first step, not before (%s).", error)


def _specification(x: Any, y: Any, sample_weight: Any) -> Any:
    if isinstance(x, tf.data.Dataset):
        return x.element_spec
    arrays = x[0] if isinstance(x, keras.utils.PyDataset) else keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in keras.tree.flatten(arrays)):
        return None
    return keras.tree.map_structure(_batch_of, arrays)


def _batch_of(array: Any) -> tf.TensorSpec:
    dtype = keras.backend.standardize_dtype(array.dtype)
    return tf.TensorSpec([None, *array.shape[1:]], keras.config.floatx() if dtype == "float64" else dtype)


class EqualSteps(keras.callbacks.Callback):
    """Ends each epoch, on all ranks, after the fewest batches that any rank has.

    Where every rank knows its number of batches, and steps are executed one by one, the smallest is
    agreed on when training begins and costs nothing. Otherwise ranks that are out of data take part
    in the others' next step with nothing to give, which tells those to stop, too.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        steps = exchange_objects(self.params.get("steps"), runtime.wire(), "tp.steps")
        known = None not in steps
        equal = known and len(set(steps)) == 1
        self._limit = min(steps) if equal or (known and self.model.steps_per_execution == 1) else None
        if not equal:
            counts = ", ".join("unknown" if s is None else str(s) for s in sorted(set(steps), key=str))
            runtime.say(
                "tfposeidon: ranks have different or unknown numbers of batches (%s); each epoch ends on all ranks "
                "after the fewest that any of them has.",
                counts,
            )
        self._watch_absence(self._limit is None)

    def _watch_absence(self, wanted: bool) -> None:
        if self.model.optimizer.ends_with_first_rank != wanted:
            self.model.optimizer.ends_with_first_rank = wanted
            self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done = 0
        self._open = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._limit is not None and batch >= self._limit:
            raise StopIteration

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._done = batch + 1
        if self._limit is None and self.model.optimizer.absent_ranks:
            raise StopIteration

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_steps()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_steps()

    def _end_steps(self) -> None:
        if not getattr(self, "_open", False):
            return
        self._open = False
        if self._limit is None:
            self.model.optimizer.finish_epoch()
        elif self._done < self._limit:
            raise RuntimeError(
                f"Every rank must do the {self._limit} steps per epoch that were agreed on. Received: only "
                f"{self._done} on rank {runtime.rank()}: its data ran out early, or a callback set stop_training in "
                "the middle of an epoch. Give it more data, leave steps_per_epoch out, or stop at an epoch's end."
            )


class EqualEnd(keras.callbacks.Callback):
    """Stops training on all ranks after the epoch in which any rank wants to stop."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wishes = exchange_objects(bool(self.model.stop_training), runtime.wire(), "tp.stop")
        self.model.stop_training = any(wishes)
