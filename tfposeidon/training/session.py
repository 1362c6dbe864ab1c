"""Provides the session of a model: its communicating optimizers and its training loop's state.

Think of a session as a record attached to the model, which `fit`, callbacks and optimizers share.
Communicating optimizers are found through the model's attributes.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfposeidon import sample_counts
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire
from tfposeidon.training.hooks import FitHooks

alive: weakref.WeakSet[Any] = weakref.WeakSet()
"""All communicating optimizers of this process. If there are none, models are not searched."""
_MOST_ITEMS = 100
"""Maximum number of items that are searched for optimizers in a model's list or dictionary."""
_Check = Callable[[Any, list[Any]], None]
_checked_by: contextvars.ContextVar[_Check | None] = contextvars.ContextVar("check", default=None)
"""Function that checks each optimizer that performs a step, and its variables."""


def is_distributed(optimizer: Any) -> bool:
    """Returns whether an optimizer communicates, as `DistributedOptimizer` does."""
    # Check the type first, because other objects may not be hashable.
    return isinstance(optimizer, keras.optimizers.Optimizer) and optimizer in alive


def without_loss_scale(optimizer: Any) -> Any:
    """Returns the communicating optimizer inside Keras's loss scale, or else the argument."""
    is_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    inner = optimizer.inner_optimizer if is_scale else optimizer
    return inner if is_distributed(inner) else optimizer


def check_is_known(optimizer: Any, variables: list[Any]) -> None:
    """Raises `ValueError` if the model in training does not hold this optimizer."""
    if check := _checked_by.get():
        check(optimizer, variables)


def optimizers_of(model: Any) -> list[Any]:
    """Returns `held_by`, with loss scales around communicating optimizers removed."""
    return [without_loss_scale(one) for one in held_by(model)]


def held_by(model: Any) -> list[Any]:
    """Returns every communicating optimizer of a model once, or the loss scale around it.

    `model.optimizer` comes first; the others follow in the order of assignment, which is equal on
    all ranks.
    """
    # Models with their own `compile`, such as GANs, may use any attribute name. So the attributes
    # of the model, of its layers and of inner models are searched, and the items of their lists and
    # dictionaries, but no nested lists. A step rejects optimizers elsewhere. Optimizers of an inner
    # model that was compiled itself, such as a pretrained encoder, do not train this model.
    if not alive:
        return []
    layers = model._flatten_layers(include_self=False)
    holders = [model, *(layer for layer in layers if not getattr(layer, "compiled", False))]
    found = [
        getattr(model, "optimizer", None),
        *(value for holder in holders for value in _attributes(holder)),
    ]
    held: dict[int, Any] = {}
    for value in found:
        ours = without_loss_scale(value)
        if is_distributed(ours) and held.get(id(ours), ours) is ours:
            held[id(ours)] = value
    return list(held.values())


def _attributes(holder: Any) -> list[Any]:
    """Returns attribute values that may be optimizers, and the first items of collections."""
    found = []
    # Iterate over a copy, because other threads may assign attributes meanwhile. Layers have dozens
    # of attributes and `fit` calls this often, so the loop allocates nothing per attribute.
    for value in list(vars(holder).values()):
        if isinstance(value, keras.optimizers.Optimizer):
            found.append(value)
        elif isinstance(value, dict):
            found += itertools.islice(value.values(), _MOST_ITEMS)
        elif isinstance(value, list | tuple):
            found += itertools.islice(value, _MOST_ITEMS)
    return found


@contextlib.contextmanager
def refusing_hidden_optimizers(model: Any, known: Sequence[Any] = ()) -> Iterator[None]:
    """Raises `ValueError` for optimizers found only in a step, because `fit` needs their hooks."""

    def refuse(optimizer: Any, variables: list[Any]) -> None:
        # Within a `fit` of a model without such optimizers, a callback may train another model.
        own = known or {id(v) for v in variables} & {id(v) for v in model.trainable_variables}
        if not own or any(one is optimizer for one in known):
            return
        raise ValueError(
            "A communicating optimizer must be an attribute of its model, or an item of a list or "
            f"dictionary attribute. Received: {optimizer.name!r}, which trains {model.name!r} and "
            "was found only in its first step. Assign it to an attribute of the model before fit."
        )

    token = _checked_by.set(refuse)
    try:
        yield
    finally:
        _checked_by.reset(token)


class Session:
    """State that a model's training loop, its callbacks and its optimizers share; see `of`.

    Attributes:
      watched: Optimizers whose steps detect ranks with exhausted input; see `watch_absence`.
      callbacks_with_state: Callbacks of the last `fit` that have a method `state`, by `id`.
      has_scheme_changes: True if a callback changes schemes; a resumed run uses the saved schemes.
      has_logged_xla: True once the model has logged what XLA compiles.
      has_begun: True once a `fit` has started all ranks from equal values.
      counts_steps: True if the steps of an execution are counted.
      knows_lengths: False in a `fit` in which ranks may end an epoch after different numbers of
        steps.
      knows_position: True in a `fit` whose data follow one order over all ranks.
      compared: Optimizer with which a callback last compared replicas.
      only_reports: True in a `fit` that logs differences between ranks instead of raising an error.
      batches_to_skip: Number of batches of a resumed epoch to drop, a multiple of
        `steps_per_execution`.
      was_skipped: True at the end of a batch that was dropped.
      is_outside_of_fit: True after a `fit` whose traced step is valid for equal batches only.
      is_executing: True during an execution of the train function.
      shuffles: True in a `fit` that shuffles samples itself.
    """

    def __init__(self, model: keras.Model) -> None:
        # Use a weak reference, because the model holds its session.
        self._reference = weakref.ref(model)
        self._weights_equally = False
        # Place the counter on the CPU, because Python reads it after each execution.
        with tf.init_scope(), tf.device("/CPU:0"):
            self._step_counter = tf.Variable(tf.zeros([], tf.int64), trainable=False, name="steps")
        self.watched: list[Any] = []
        self.callbacks_with_state = weakref.WeakValueDictionary[int, Any]()
        self.has_logged_xla = self.has_scheme_changes = self.has_begun = self.counts_steps = False
        self.knows_position = self.only_reports = self.shuffles = False
        self.was_skipped = self.is_outside_of_fit = self.is_executing = False
        self.knows_lengths = True
        self.batches_to_skip = 0
        self.compared: Any = False

    @property
    def model(self) -> Any:
        return self._reference()

    @property
    def optimizers(self) -> list[Any]:
        return optimizers_of(self.model)

    @property
    def hooks(self) -> list[FitHooks]:
        return [optimizer.fit_hooks(self.model) for optimizer in self.optimizers]

    @property
    def step_hooks(self) -> list[tuple[Callable[[], None], Callable[[int], None]]]:
        """`begin_step` and `end_step` of each optimizer that has them."""
        hooks = [(one.begin_step, one.end_step) for one in self.hooks]
        return [(begin, end) for begin, end in hooks if begin and end]

    @property
    def is_in_step(self) -> bool:
        """True if ranks exchange in each step, False if some train local weights."""
        return all(hooks.is_in_step for hooks in self.hooks)

    @contextlib.contextmanager
    def global_weights(self, assign: bool = False) -> Iterator[None]:
        """Assigns the global weights, equal on all ranks, to the variables within this context."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.global_weights(assign))
            yield

    @property
    def wire(self) -> Wire:
        """Communicator of the ranks that exchange in each step: all ranks, or this rank alone."""
        return next((hooks.wire for hooks in self.hooks if hooks.wire), runtime.wire)()

    def steps_until_exchange(self, optimizers: Iterable[Any]) -> int:
        """Returns an upper bound of the number of steps until these optimizers communicate."""
        # With gradient accumulation, ranks exchange once in several steps, and callbacks run once
        # per execution. The optimizers are arguments, because searching all layers takes too long
        # for each batch.
        accumulated = [one.gradient_accumulation_steps or 1 for one in optimizers]
        return max([*accumulated, self.model.steps_per_execution])

    # ------------------------------------------------------------------ schemes and resuming

    def begin_fit(self, callbacks: Sequence[Any]) -> None:
        """Discards the state of an interrupted `fit`, and reads attributes of the callbacks."""
        self.reset_initial_epoch()
        self.only_reports = False
        self.knows_position = any(getattr(one, "knows_position", False) for one in callbacks)
        found = {id(one): one for one in callbacks if callable(getattr(one, "state", None))}
        self.callbacks_with_state = weakref.WeakValueDictionary(found)

    def resume_at(self, epoch: int, batches: int) -> None:
        """Resumes the starting `fit` within an epoch; earlier batches are read and dropped."""
        # Keras's `fit` reads this attribute after `on_train_begin`, for `BackupAndRestore`.
        self.model._initial_epoch = epoch
        self.batches_to_skip = batches
        if batches:
            self.wrap_train_function()

    def reset_initial_epoch(self) -> None:
        self.model._initial_epoch = None
        self.batches_to_skip, self.was_skipped = 0, False

    @property
    def resumed_epoch(self) -> int | None:
        """Index of the epoch from which this `fit` resumes, or `None`."""
        return getattr(self.model, "_initial_epoch", None)

    @property
    def is_resumed(self) -> bool:
        return self.resumed_epoch is not None

    @property
    def is_skipping(self) -> bool:
        """True if the next batch is dropped, at the start of a resumed epoch."""
        return self.batches_to_skip > 0

    def skip(self, iterator: Any) -> Any:
        """Drops the batches of one execution; returns the snapshot's metrics if it is the last."""
        steps = self.model.steps_per_execution
        dropped = sum(1 for _ in itertools.islice(iterator, steps))
        # The last execution of an epoch may be shorter.
        self.batches_to_skip = self.batches_to_skip - steps if dropped == steps else 0
        if not dropped:
            raise StopIteration
        if not self.is_skipping:
            # Metrics that are not built have no result.
            with contextlib.suppress(ValueError):
                # Return the metrics of the snapshot, which are final if no batches are left.
                return self.model.get_metrics_result()
        return {}

    def flush(self) -> None:
        """Starts a flush, in which later steps send all residuals."""
        for optimizer in self.optimizers:
            optimizer.exchange.flush()

    @property
    def has_flushed(self) -> bool:
        """True if all residuals have been sent since `flush`; the same on all ranks."""
        return all(optimizer.exchange.has_flushed for optimizer in self.optimizers)

    def forget_steps(self) -> None:
        """Discards step measurements, because plans may depend on them and later steps differ."""
        for optimizer in self.optimizers:
            optimizer.exchange.plans.planner.forget_steps()

    def change_scheme(self, policy: Any) -> None:
        """Applies a policy to all optimizers; all ranks must call it at the same step."""
        for optimizer in self.optimizers:
            optimizer.change_scheme(policy)
        self.retrace()

    def retrace(self) -> None:
        """Rebuilds the train function; batches that remain to be dropped are still dropped."""
        self.model.make_train_function(force=True)
        self.wrap_train_function()

    def wrap_train_function(self) -> None:
        """Wraps the model's train function in a `TrainFunction`, and updates its hooks."""
        if not isinstance(self.model.train_function, TrainFunction):
            self.is_outside_of_fit = False
            self.model.train_function = TrainFunction(self)
        self.model.train_function.hooks = self.step_hooks

    # ------------------------------------------------------------------ weights of each rank

    def check_in_step(self, received: str) -> None:
        """Raises `ValueError` if callbacks communicate within epochs but step counts may differ."""
        # If ranks train local weights, a rank detects only in the next synchronization that another
        # rank has fewer batches.
        if not self.knows_lengths and not self.is_in_step:
            raise ValueError(
                "If each rank trains its own weights and the length of epochs is unknown, ranks "
                f"can communicate at the end of epochs only. Received: {received}. Leave it out, "
                "or pass steps_per_epoch to fit."
            )

    # ------------------------------------------------------------------ steps and the end of epochs

    @contextlib.contextmanager
    def train_step(self, data: Any) -> Iterator[None]:
        """Returns a context for tracing a train step, in which `data` determines sample counts."""
        optimizers = self.optimizers
        with contextlib.ExitStack() as stack:
            if self.watches_absence:
                # A step that finds no data must not change counters or copies of weights.
                stack.enter_context(tf.control_dependencies(sample_counts.tensors(data)[:1]))
            if self.watches_absence or self.counts_steps:
                # This op is part of the traced step, so that it counts each step of an execution.
                self._step_counter.assign_add(1)
            for optimizer in optimizers:
                stack.enter_context(optimizer.exchange.batch.counting(data))
            stack.enter_context(refusing_hidden_optimizers(self.model, optimizers))
            yield
        # The step has built the optimizers by now.
        _check_variables_are_apart(self.model, optimizers)

    def watch_absence(self, wanted: bool) -> bool:
        """Sets whether steps detect ranks with exhausted input; returns whether to retrace."""
        # All ranks must pass the same value. Store optimizers: a search takes longer than a step.
        before, optimizers = self.watches_absence, self.optimizers
        self.watched = optimizers if wanted else []
        # Set all optimizers, because one may have trained another model since this one was traced.
        for optimizer in optimizers:
            optimizer.exchange.absence.watch(wanted)
        return before != wanted

    @property
    def watches_absence(self) -> bool:
        """True if steps detect ranks with exhausted input."""
        return bool(self.watched)

    def weight_equally(self, wanted: bool) -> bool:
        """Sets whether ranks weight their batches equally; returns whether to retrace."""
        # With equal weights, optimizers that exchange gradients in each step count no samples.
        in_step = [one for one in self.optimizers if one.fit_hooks(self.model).is_in_step]
        batches = [optimizer.exchange.batch for optimizer in in_step]
        for batch in batches:
            batch.are_equal = wanted
        before, self._weights_equally = self._weights_equally, wanted
        # Retrace only if necessary: a function in the train step retains its trace, which a later
        # trace of the train step cannot call.
        return before != wanted and any(one.was_known or not one.is_nested for one in batches)

    @contextlib.contextmanager
    def agreed_weighting(self) -> Iterator[None]:
        """Applies the agreed weighting during `fit`; batches outside of it may have other sizes."""
        if self.is_outside_of_fit:
            self.is_outside_of_fit = False
            self.weight_equally(True)
        try:
            yield
        finally:
            self.batches_to_skip = 0
            self.is_outside_of_fit = self.weight_equally(False)

    @property
    def steps_executed(self) -> int:
        """Number of executed train steps, if they are counted."""
        return int(self._step_counter.numpy())

    @property
    def steps_done(self) -> tuple[int, int, int]:
        """Numbers of train steps, of complete exchanges, and of absent ranks in this epoch."""
        counts = [optimizer.exchange.absence.counts for optimizer in self.watched]
        complete = sum(complete for _, complete in counts)
        return self.steps_executed, complete, max((absent for absent, _ in counts), default=0)


class TrainFunction:
    """Train function that calls the hooks of a model's optimizers around each execution.

    Keras has no hook between reading a batch and training on it, so this function has two more
    tasks. It drops the batches that precede a resumed step. It also retraces the step for the first
    batch after a `fit` in which ranks weighted their batches equally, because batches outside of
    `fit` may differ in size.
    """

    def __init__(self, own: Session) -> None:
        # This list is complete, because optimizers that are found only in a step raise an error.
        self._session, self.hooks = own, own.step_hooks
        self._train: Callable[[Any], Any] = own.model.train_function

    def __call__(self, iterator: Any) -> Any:
        own = self._session
        if own.is_outside_of_fit:
            own.model.make_train_function(force=True)
            return own.model.train_function(iterator)
        if own.is_executing:
            # A model may have wrapped another `TrainFunction` in its own function.
            return self._train(iterator)
        own.was_skipped = own.is_skipping
        if own.was_skipped:
            return own.skip(iterator)
        before = own.steps_executed if own.counts_steps else 0
        for begin, _ in self.hooks:
            begin()
        own.is_executing = True
        try:
            logs = self._train(iterator)
        finally:
            own.is_executing = False
        steps = own.steps_executed - before if own.counts_steps else 1
        for _, end in self.hooks:
            end(steps)
        return logs


def trains_all_together(model: Any) -> bool:
    """Returns whether Keras's own train step is used, which updates all variables in one call."""
    own = getattr(model.train_step, "_tfposeidon", model.train_step)
    return str(own.__module__).startswith("keras.")


def _check_variables_are_apart(model: Any, optimizers: list[Any]) -> None:
    """Raises `ValueError` if two optimizers synchronize the same weights."""
    # Each optimizer would mistake the other's changes for updates of this rank.
    owners: dict[int, Any] = {}
    for optimizer in optimizers:
        if not optimizer.built or optimizer.fit_hooks(model).is_in_step:
            continue
        for variable in optimizer._trainable_variables:
            other = owners.setdefault(id(variable), optimizer)
            if other is not optimizer:
                raise ValueError(
                    "A variable must have only one optimizer that synchronizes weights. "
                    f"Received: {variable.path!r}, which both {other.name!r} and "
                    f"{optimizer.name!r} of this model train. Use one optimizer for each "
                    "variable, and delete the model attribute that holds an unused optimizer."
                )


def of(model: keras.Model) -> Session:
    """Returns the model's session, created at the first call."""
    session = getattr(model, "_tfposeidon_session", None)
    if session is None:
        session = model._tfposeidon_session = Session(model)
    return session
