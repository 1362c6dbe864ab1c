"""Patches methods of `keras.Model` for models with communicating optimizers.

Keras gives an optimizer no access to the model that it trains. So the first communicating optimizer
of a process wraps two methods of `keras.Model`; models with other optimizers keep their behavior.
Keras looks these methods up after the optimizer is constructed, even in
`model.compile(optimizer=tp.DistributedOptimizer(...))`, where wrapping `compile` would be too late.

- `make_train_function`: builds the train step with exchanges outside of XLA, which cannot compile
  them (`xla`), and passes the batch size to the optimizer, which weights unequal batches by it.
- `fit`: prints on one rank only, without a progress bar if there is no terminal, compares the data
  that ranks pass (`fit_arguments`), ends epochs on all ranks after the same step (`equal_steps`),
  and averages layer state and metrics (`global_metrics`).
- Both call the hooks of optimizers (`hooks.FitHooks`).

In `LossScaleOptimizer.apply`, a loss scale around a communicating optimizer averages gradients
before it checks and unscales them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.training import entries, equal_steps, fit_arguments, global_metrics, session, xla

log = logging.getLogger("tfposeidon")


def patch_keras() -> None:
    """Wraps methods of `keras.Model` and of `LossScaleOptimizer`; a second call has no effect."""
    for name, replacement in (("make_train_function", _make_train_function), ("fit", _fit)):
        owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
        if not hasattr(getattr(owner, name), "_tfposeidon"):
            setattr(owner, name, _wrapped(getattr(owner, name), replacement))
    scale = keras.optimizers.LossScaleOptimizer
    if not hasattr(scale.apply, "_tfposeidon"):
        scale.apply = _averaging_first(scale.apply)


def _averaging_first(original: Any) -> Any:
    @functools.wraps(original)
    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Any, trainable_variables: Any = None, **others: Any) -> None:
        inner = self.inner_optimizer
        # Within its own step, the loss scale already receives averaged gradients.
        if not session.is_distributed(inner) or inner.updater is self:
            original(self, grads, trainable_variables, **others)
        else:
            inner.apply_under(self, grads, trainable_variables, **others)

    apply._tfposeidon = True  # type: ignore[attr-defined]
    return apply


def _wrapped(original: Any, replacement: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session.optimizers_of(self):
            return replacement(original, signature.bind(self, *args, **kwargs))
        # A step that was built for communicating optimizers may contain compiled functions.
        own = getattr(vars(self).get("train_step"), "_tfposeidon", None)
        if own is not None:
            self.train_step = own
        with session.refusing_hidden_optimizers(self):
            return original(self, *args, **kwargs)

    method._tfposeidon = True  # type: ignore[attr-defined]
    return method


def _make_train_function(original: Any, call: inspect.BoundArguments) -> Any:
    model = call.arguments["self"]
    # XLA can compile the whole step of a single rank if schemes have no state.
    optimizers = session.optimizers_of(model)
    is_alone = runtime.size() == 1 and not any(one.policy.keeps_state for one in optimizers)
    functions = xla.requested_functions(model, optimizers, is_optional=is_alone)
    for optimizer in optimizers:
        optimizer.xla_functions = functions
    _prepare_train_step(model, optimizers, functions)
    own = session.of(model)
    own.counts_steps = bool(own.step_hooks) and model.steps_per_execution != 1
    # Restore the setting afterwards, because evaluation can use XLA.
    wanted = model.jit_compile
    if functions or not is_alone:
        model.jit_compile = False
    if (functions or model.jit_compile != wanted) and not own.has_logged_xla:
        own.has_logged_xla = True
        runtime.log_once(
            "tfposeidon: XLA compiles %s; it can compile neither collectives nor top-k selection.",
            f"the gradients of this model in {functions} function(s)"
            if functions
            else "no part of this model's steps, without xla_segments in the optimizer",
        )
    try:
        made = original(*call.args, **call.kwargs)
    finally:
        model.jit_compile = wanted
    own.wrap_train_function()
    return made


def _prepare_train_step(model: Any, optimizers: list[Any], functions: int) -> None:
    """Wraps the train step: it then counts samples, and XLA compiles `functions` functions."""
    # XLA compiles the steps of a single rank, and has no access to variables on the CPU.
    for optimizer in optimizers if runtime.size() > 1 else ():
        optimizer.exchange.batch.build()
    own = getattr(model.train_step, "_tfposeidon", model.train_step)
    # Clone a `tf.function`, because its cached traces do not include the context below.
    step = own._clone(None) if isinstance(own, tf.types.experimental.PolymorphicFunction) else own
    step = xla.compiled(model, step, functions) if functions else step

    @functools.wraps(step)
    def train_step(data: Any) -> Any:
        if runtime.size() > 1:
            global_metrics.refuse_synchronized(model)
        with session.of(model).train_step(data):
            return step(data)

    train_step._tfposeidon = own  # type: ignore[attr-defined]
    model.train_step = train_step


def _fit(original: Any, call: inspect.BoundArguments) -> Any:
    model = call.arguments["self"]
    call.apply_defaults()
    callbacks = call.arguments["callbacks"] = _as_list(call.arguments["callbacks"])
    own = session.of(model)
    own.begin_fit(callbacks)
    own.shuffles = call.arguments["shuffle"] and _can_shuffle(call.arguments["x"])
    # Create the hooks before the model is built, because they give optimizers access to the model.
    hooks = own.hooks
    for one in hooks:
        one.check(callbacks)
    _prepare(model, call.arguments)
    if call.arguments["verbose"] == "auto":
        call.arguments["verbose"] = _verbosity()
    for one in hooks:
        if one.run is not None:
            return one.run(original, call)
    if runtime.size() == 1:
        return original(*call.args, **call.kwargs)
    synchronizes = all(one.synchronizes_model for one in hooks)
    if synchronizes:
        _synchronize_start(model, callbacks)
    fit_arguments.compare_data(model, call.arguments)
    writing, rows = fit_arguments.with_one_writer(callbacks), _rows_of_batches(call.arguments)
    call.arguments["callbacks"] = equal_steps.with_equal_epochs(writing, hooks, rows, synchronizes)
    with own.agreed_weighting(), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        for one in hooks:
            stack.enter_context(one.around(callbacks))
        # Keras's warning is wrong if another rank has fewer batches; see `EqualSteps`.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        return original(*call.args, **call.kwargs)


def _synchronize_start(model: Any, callbacks: list[Any]) -> None:
    """Starts a model's first `fit` with the values of one rank, before callbacks read them."""
    global_metrics.check_saves(model, callbacks)
    # `AgreedStop` synchronizes values again, because callbacks may restore them.
    if not session.of(model).has_begun:
        # Use the root of a `BroadcastVariables`, whose values would otherwise be overwritten.
        root = next((one.root_rank for one in callbacks if hasattr(one, "root_rank")), 0)
        # Synchronize global weights: ranks retain local weights that a loop before `fit` trained.
        with session.of(model).global_weights(assign=True):
            entries.synchronize_start(model, runtime.wire(), root)


def _can_shuffle(x: Any) -> bool:
    """Returns whether `fit` with `shuffle=True` shuffles these data."""
    is_dataset = isinstance(x, keras.utils.PyDataset)
    return is_dataset or all(hasattr(array, "shape") for array in keras.tree.flatten(x))


def _rows_of_batches(arguments: dict[str, Any]) -> int | None:
    """Returns the number of rows of each batch of `fit`, or `None` if unknown or not constant."""
    x = arguments["x"]
    if isinstance(x, tf.data.Dataset):
        specs = [one for one in tf.nest.flatten(x.element_spec) if isinstance(one, tf.TensorSpec)]
        rows = {spec.shape[0] if spec.shape.rank else None for spec in specs}
        return rows.pop() if len(rows) == 1 else None
    arrays = [array for array in keras.tree.flatten(x) if isinstance(array, np.ndarray | tf.Tensor)]
    if not arrays or (arguments["steps_per_epoch"] and not arguments["batch_size"]):
        return None
    count = len(arrays[0])
    if arguments["validation_data"] is None:
        count = math.floor(count * (1.0 - arguments["validation_split"]))
    batch: int = arguments["batch_size"] or 32
    return None if count % batch else batch


def _prepare(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Builds model and optimizer state before the first step, which is then traced only once."""
    optimizer = session.without_loss_scale(model.optimizer)
    if session.is_distributed(optimizer):
        first = fit_arguments.first_batch(arguments)
        _build(model, *first or (arguments[name] for name in ("x", "y", "sample_weight")))
        if model.optimizer.built and runtime.size() > 1 and session.trains_all_together(model):
            # Create variables now: if a trace creates any, TensorFlow traces the step again.
            optimizer.fit_hooks(model).prepare(model.trainable_weights)


def _as_list(callbacks: Any) -> list[Any]:
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    return callbacks.callbacks if is_list else keras.tree.flatten(callbacks or [])


def _build(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> None:
    """Builds model, metrics and optimizer before callbacks broadcast or restore them."""
    # With TensorFlow, Keras builds a model in its first step. A model that can be built neither
    # from shapes nor from a sample remains unbuilt until then, and callbacks that require a built
    # model raise an error. Build an eager model from a sample, because its code may need values.
    if not model.run_eagerly or model.built:
        with _trying("from shapes"), _functions_run_as_python():
            specification = _batch_specification(x, y, sample_weight)
            if specification is not None:
                model._symbolic_build(data_batch=specification)
    if not entries.has_weights(model):
        with _trying("from a sample"):
            # Call the model, because it may use operations that reject symbolic tensors.
            model(_first_sample(x), training=False)
    if model.built and not model.optimizer.built and session.trains_all_together(model):
        model.optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def _trying(way: str) -> Iterator[None]:
    """Suppresses errors while a model is built, because its first step can build it instead."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the code of a model may raise any error.
        log.debug("tfposeidon: the model was not built %s: %s", way, error)


_building = threading.RLock()
_FUNCTION: Any = type(tf.function(lambda: None))


@contextlib.contextmanager
def _functions_run_as_python() -> Iterator[None]:
    """Runs each `tf.function` as Python, because a trace would retain tensors of this graph."""
    # Unlike `tf.config.run_functions_eagerly`, this affects the current thread only: other threads
    # exchange samples and weights in a `tf.function`, whose collectives would lose their names.
    thread = threading.get_ident()
    with _building:
        call = _FUNCTION.__call__

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                return self.python_function(*args, **kwargs)
            return call(self, *args, **kwargs)

        _FUNCTION.__call__ = run
        try:
            yield
        finally:
            _FUNCTION.__call__ = call


def _first_sample(x: Any) -> Any:
    """Returns one sample for a call of the model; zeros for a dataset, to avoid reading it."""
    if isinstance(x, tf.data.Dataset):
        specification, _, _ = keras.utils.unpack_x_y_sample_weight(x.element_spec)
        return keras.tree.map_structure(_zeros, specification)
    if isinstance(x, keras.utils.PyDataset):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(x[0])
    return keras.tree.map_structure(lambda array: array[:1], x)


def _zeros(specification: Any) -> Any:
    shape = [1, *specification.shape[1:]]
    if isinstance(specification, tf.RaggedTensorSpec):
        dense = tf.zeros([size or 1 for size in shape], specification.dtype)
        return tf.RaggedTensor.from_tensor(dense, ragged_rank=specification.ragged_rank)
    # An unknown dimension raises an error here, because layers may depend on its size.
    return tf.zeros(shape, specification.dtype)


def _batch_specification(x: Any, y: Any, sample_weight: Any) -> Any:
    """Returns shapes and dtypes of a batch, or `None` for data without them."""
    if isinstance(x, tf.data.Dataset):
        return x.element_spec
    if isinstance(x, keras.utils.PyDataset):
        arrays = x[0]
    else:
        arrays = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    leaves = keras.tree.flatten(arrays)
    if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        return None
    return keras.tree.map_structure(_array_specification, arrays)


def _array_specification(array: Any) -> tf.TensorSpec:
    dtype = keras.backend.standardize_dtype(array.dtype)
    # Keras casts NumPy's default floating-point dtype when it makes batches of arrays.
    dtype = keras.config.floatx() if dtype == "float64" else dtype
    return tf.TensorSpec([None, *array.shape[1:]], dtype)


def _verbosity() -> Any:
    """Returns the value for `verbose="auto"`: 0 except on the leader, 2 without a terminal."""
    if runtime.rank() != runtime.leader():
        return 0
    # Keras treats `"auto"` as 1, a progress bar, even without a terminal. A pipe or file, as under
    # `horovodrun`, records the bar's backspaces and carriage returns, so that an epoch fills pages.
    # Notebooks and PyCharm show the bar without a terminal; Keras's own progress bar detects them
    # in the same way.
    shows_bars = (
        "ipykernel" in sys.modules
        or "PYCHARM_HOSTED" in os.environ
        or getattr(sys.stdout, "isatty", bool)()
    )
    # Without interactive logging, Keras writes its output to absl's log, line by line.
    return "auto" if shows_bars and keras.config.is_interactive_logging_enabled() else 2
