"""Session of a model: its optimizers that communicate, and the state that its loop shares."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.joining import join_until_all_have_ended
from tfposeidon.policies import Policy
from tfposeidon.training.hooks import FitHooks
from tfposeidon.training.train_functions import OutsideOfFit, SkipBatches

_distributed: tuple[type, ...] = ()
"""`OptimizerWrapper`, once there is one: its module imports this one, which cannot import it."""
_alive: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that communicate. Where there is none, models are not looked at."""
_MOST_ITEMS = 100
"""Items of a list or dictionary of a model among which optimizers are looked for."""
_Join = Callable[[Any, list[Any]], None]
_joined_by: contextvars.ContextVar[_Join | None] = contextvars.ContextVar("join", default=None)
"""What an optimizer that takes a step is told to, with its variables, within a train step."""


def register_optimizer_class(optimizer_class: type) -> None:
    """Makes instances of a class count as optimizers that communicate.

    Args:
      optimizer_class: `OptimizerWrapper`.
    """
    global _distributed
    _distributed = (optimizer_class,)


def is_distributed(optimizer: Any) -> bool:
    """Returns whether an optimizer communicates, as `DistributedOptimizer` does.

    Args:
      optimizer: Any object.
    """
    return isinstance(optimizer, _distributed)


def without_loss_scale(optimizer: Any) -> Any:
    """Returns the optimizer that communicates inside Keras's loss scale, or else the argument."""
    is_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    inner = optimizer.inner_optimizer if is_scale else optimizer
    return inner if is_distributed(inner) else optimizer


def note_made(optimizer: Any) -> None:
    """Notes that there is an optimizer that communicates."""
    _alive.add(optimizer)


def note_applied(optimizer: Any, variables: list[Any]) -> None:
    """Tells the model whose train step this is, if any, that an optimizer takes part in it.

    Args:
      optimizer: Optimizer that communicates, or Keras's loss scale around it.
      variables: Variables that it updates.
    """
    if join := _joined_by.get():
        join(optimizer, variables)


def optimizers_of(model: Any) -> list[Any]:
    """Finds every optimizer of a model that communicates, such as a `DistributedOptimizer`.

    Args:
      model: A Keras model.

    Returns:
      The optimizers of `held_by`, without the loss scales around them.
    """
    return [without_loss_scale(one) for one in held_by(model)]


def held_by(model: Any) -> list[Any]:
    """Finds every optimizer of a model that communicates, as the model holds it.

    Models with a `compile` of their own, such as GANs, call their optimizers what they like. So all
    attributes of the model and of the layers and models inside it are looked at, and items of lists
    and dictionaries there, but no deeper: what else a model holds is its own. Others are found once
    they have taken part in a train step. A model inside that was compiled itself, such as an
    encoder that was trained before, keeps its optimizers to itself.

    Args:
      model: A Keras model.

    Returns:
      Each optimizer once, in Keras's loss scale if the model has one around it: `model.optimizer`
      first, the others in the order in which they were assigned, which is the same on all ranks.
    """
    if not _alive:
        return []
    own = getattr(model, "_tfposeidon_session", None)
    layers = model._flatten_layers(include_self=False)
    holders = [model, *(layer for layer in layers if not getattr(layer, "compiled", False))]
    found = [
        getattr(model, "optimizer", None),
        *(value for holder in holders for value in _attributes(holder)),
        *(own.applied if own else ()),
    ]
    held: dict[int, Any] = {}
    for value in found:
        ours = without_loss_scale(value)
        if is_distributed(ours) and held.get(id(ours), ours) is ours:
            held[id(ours)] = value
    return list(held.values())


def _attributes(holder: Any) -> list[Any]:
    """Returns attributes of a layer that may be optimizers, and first items of its collections."""
    found = []
    # A list, for other threads may assign attributes meanwhile. Layers have dozens of attributes,
    # and `fit` asks often: nothing is made for each of them.
    for value in list(vars(holder).values()):
        if isinstance(value, (*_distributed, keras.optimizers.LossScaleOptimizer)):
            found.append(value)
        elif isinstance(value, dict):
            found += itertools.islice(value.values(), _MOST_ITEMS)
        elif isinstance(value, list | tuple):
            found += itertools.islice(value, _MOST_ITEMS)
    return found


@contextlib.contextmanager
def refusing_hidden_optimizers(model: Any) -> Iterator[None]:
    """Surrounds a `fit` of Keras's own: an optimizer that communicates would do half of it."""

    def refuse(optimizer: Any, variables: list[Any]) -> None:
        # A callback may train another model meanwhile.
        if not {id(v) for v in variables} & {id(v) for v in model.trainable_variables}:
            return
        name = without_loss_scale(optimizer).name
        raise ValueError(
            "An optimizer that communicates must be an attribute of its model, or an item of a "
            f"list or dictionary there. Received: {name!r}, which trains "
            f"{model.name!r} and was found only in its first step. Assign it to an attribute of "
            "the model before fit."
        )

    with _joined(refuse) if _alive else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _joined(join: _Join) -> Iterator[None]:
    token = _joined_by.set(join)
    try:
        yield
    finally:
        _joined_by.reset(token)


class Session:
    """State that a model's training loop, its callbacks and its optimizers share.

    `session.of(model)` returns the model's own.

    Args:
      model: The model; it is not kept alive.

    Attributes:
      counts_steps: True if the steps of an execution are counted.
      has_begun: True once a `fit` has made all ranks begin alike.
      knows_lengths: False in a `fit` in which ranks may end an epoch after different steps.
      knows_position: True in a `fit` whose data follow one order over all ranks.
      only_reports: True in a `fit` whose ranks go on where their weights differ.
      shuffles: True in a `fit` that draws the order of samples itself.
    """

    def __init__(self, model: keras.Model) -> None:
        # The model holds its session: a strong reference back would leave both to the garbage
        # collector.
        self._reference = weakref.ref(model)
        self._weighs_alike = False
        self._watches_absence = False
        self._step_counter: tf.Variable | None = None
        self._watched: list[Any] = []
        self._applied: list[weakref.ref[Any]] = []
        self._with_state: list[weakref.ref[Any]] = []
        self._has_logged_xla = False
        self._has_scheme_changes = False
        self.has_begun = False
        self.counts_steps = False
        self.knows_lengths = True
        self.knows_position = False
        self.only_reports = False
        self.shuffles = False

    @property
    def _model(self) -> Any:
        return self._reference()

    @property
    def optimizers(self) -> list[Any]:
        """The model's optimizers that communicate: see `optimizers_of`."""
        return optimizers_of(self._model)

    @property
    def hooks(self) -> list[FitHooks]:
        """What `fit` does for each of the model's optimizers."""
        return [optimizer.fit_hooks(self._model) for optimizer in self.optimizers]

    @property
    def is_in_step(self) -> bool:
        """True if ranks exchange in each step, False if some train weights of their own."""
        return all(hooks.is_in_step for hooks in self.hooks)

    @contextlib.contextmanager
    def global_weights(self, assign: bool = False) -> Iterator[None]:
        """Puts weights that are equal on all ranks into the variables, within this context."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.global_weights(assign))
            yield

    @property
    def applied(self) -> list[Any]:
        """Optimizers that were found in a train step, or the loss scales around them."""
        return [optimizer for one in self._applied if (optimizer := one()) is not None]

    def note_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Notes what callbacks of a `fit` say: what they keep, and that they know the position."""
        self.knows_position = any(getattr(one, "knows_position", False) for one in callbacks)
        said = [one for one in callbacks if callable(getattr(one, "state", None))]
        self._with_state = [weakref.ref(one) for one in said]

    @property
    def callbacks_with_state(self) -> list[Any]:
        """Callbacks of the last `fit` that have a method `state`."""
        return [callback for one in self._with_state if (callback := one()) is not None]

    @property
    def wire(self) -> Wire:
        """Wire between the ranks that train in step with this one: all, or this one alone."""
        return next((hooks.wire for hooks in self.hooks), runtime.wire)()

    def steps_until_exchange(self, optimizers: Iterable[Any]) -> int:
        """Returns after how many steps optimizers have exchanged for certain, from a call's end on.

        Those that accumulate exchange once in several steps, and callbacks are called once in
        `steps_per_execution`.

        Args:
          optimizers: Some of the model's; to find all of them takes a walk over its layers, which
            is not for every batch.
        """
        accumulated = [one.gradient_accumulation_steps or 1 for one in optimizers]
        return max([*accumulated, self._model.steps_per_execution])

    def log_xla_is_off(self) -> None:
        """Logs, once, that XLA is off for the model's steps."""
        # Keras asks more than once.
        if not self._has_logged_xla:
            self._has_logged_xla = True
            runtime.say(
                "tfposeidon: XLA is off for this model's steps: it can compile neither collectives "
                "nor selection."
            )

    # ------------------------------------------------------------------ schemes and resuming

    def announce_scheme_changes(self) -> None:
        """Notes that a callback changes the schemes: a resumed run goes on with the saved ones."""
        self._has_scheme_changes = True

    @property
    def has_scheme_changes(self) -> bool:
        """True if a callback changes the schemes."""
        return self._has_scheme_changes

    def begin_fit(self) -> None:
        """Forgets what a `fit` that was interrupted has left: its begin, and batches to drop."""
        self.begin_where_asked()
        self.only_reports = False
        self._stop_skipping()

    def _stop_skipping(self) -> None:
        left = self._model.train_function
        if isinstance(left, SkipBatches):
            self._model.train_function = left.train

    def resume_at(self, epoch: int, batches: int) -> None:
        """Makes the `fit` that begins go on in the middle of an earlier one.

        Args:
          epoch: Index of the epoch to go on with.
          batches: Batches of that epoch that were trained on before; they are read and dropped.
        """
        # Keras's own: `fit` reads it after `on_train_begin`, for `BackupAndRestore`.
        self._model._initial_epoch = epoch
        if batches:
            self._model.train_function = SkipBatches(self._model, batches)

    def begin_where_asked(self) -> None:
        """Makes `fit` begin at its own `initial_epoch` again."""
        self._model._initial_epoch = None

    @property
    def resumed_epoch(self) -> int | None:
        """Index of the epoch with which this `fit` goes on; `None` if it is not resumed."""
        return getattr(self._model, "_initial_epoch", None)

    @property
    def is_resumed(self) -> bool:
        """True if this `fit` goes on in the middle of an earlier one."""
        return self.resumed_epoch is not None

    @property
    def is_skipping(self) -> bool:
        """True if the next batch is dropped, as the first ones of a resumed epoch are."""
        train_function = self._model.train_function
        return isinstance(train_function, SkipBatches) and train_function.remaining > 0

    def flush(self) -> bool:
        """Makes steps send everything that schemes have kept, before these are changed.

        Returns:
          True if there are schemes that keep anything.
        """
        # A list, so that every optimizer flushes, whatever the first one answers.
        return any([optimizer.exchange.flush() for optimizer in self.optimizers])  # noqa: C419

    @property
    def has_flushed(self) -> bool:
        """True if a step that counted has sent everything since `flush`; on all ranks alike."""
        return all(optimizer.exchange.has_flushed for optimizer in self.optimizers)

    def forget_times(self) -> None:
        """Forgets how long steps compute, where plans are made by it: they are about to differ."""
        for optimizer in self.optimizers:
            optimizer.exchange.plans.planner.forget_times()

    def change_scheme(self, policy: Policy) -> None:
        """Exchanges by other schemes from the next step on, which is traced anew.

        Args:
          policy: Policy for all optimizers of the model; the same on all ranks, at the same step.
        """
        for optimizer in self.optimizers:
            optimizer.change_scheme(policy)
        self.retrace()

    def retrace(self) -> None:
        """Makes the train function anew; batches that are still to be dropped will be."""
        model = self._model
        skipping = model.train_function if isinstance(model.train_function, SkipBatches) else None
        model.make_train_function(force=True)
        if skipping is not None:
            skipping.train, model.train_function = model.train_function, skipping

    # ------------------------------------------------------------------ weights of each rank

    def check_in_step(self, received: str) -> None:
        """Refuses callbacks in whose batches ranks communicate, where they may not be in step.

        Where ranks train by themselves, those that have more batches than another learn of it in
        the next round only.

        Args:
          received: The callback, as the error shows it.

        Raises:
          ValueError: If ranks train by themselves, and do not know how long their epochs are.
        """
        if not self.knows_lengths and not self.is_in_step:
            raise ValueError(
                "Where each rank trains its own weights, and epochs have an unknown length, ranks "
                f"communicate at the end of epochs only. Received: {received}. Leave it out, or "
                "give fit steps_per_epoch."
            )

    # ------------------------------------------------------------------ steps and the end of epochs

    @contextlib.contextmanager
    def train_step(self, data: Any) -> Iterator[None]:
        """Surrounds a train step as it is traced: its optimizers weigh this rank by its samples.

        Args:
          data: Input of the train step, `(x, y, sample_weight)`.
        """
        if runtime.size() > 1:
            _refuse_synchronized(self._model)
        if (self._watches_absence or self.counts_steps) and self._step_counter is not None:
            # An op of the traced step, so it counts the steps within one execution, too.
            self._step_counter.assign_add(1)
        optimizers = self.optimizers
        with contextlib.ExitStack() as stack:

            def join(held: Any, variables: list[Any]) -> None:
                optimizer = without_loss_scale(held)
                if any(one is optimizer for one in optimizers):
                    return
                _check_is_in_step(optimizer, self._model)
                optimizers.append(optimizer)
                self._applied.append(weakref.ref(held))
                optimizer.exchange.absence.watch(self._watches_absence)
                if self._watches_absence:
                    self._watched.append(optimizer)
                stack.enter_context(optimizer.exchange.batch.counting(data))

            for optimizer in optimizers:
                stack.enter_context(optimizer.exchange.batch.counting(data))
            stack.enter_context(_joined(join))
            yield
        # Now that the step has built them.
        _check_variables_are_apart(self._model, optimizers)

    def build_step_counter(self) -> None:
        """Makes the variable that counts steps, before a step is traced."""
        if self._step_counter is None:
            # On the CPU: Python reads it after each execution.
            with tf.init_scope(), tf.device("/CPU:0"):
                self._step_counter = tf.Variable(
                    tf.zeros([], tf.int64), trainable=False, name="steps"
                )

    def watch_absence(self, wanted: bool) -> bool:
        """Makes steps tell whether ranks are out of data; all ranks drop the updates of such steps.

        Args:
          wanted: True to watch for ranks that are out of data; the same on all ranks.

        Returns:
          True if the step has to be traced anew.
        """
        if wanted:
            self.build_step_counter()
        # Looking for them takes longer than a small step: they are kept as long as absence is
        # watched.
        self._watched = self.optimizers if wanted else []
        # An optimizer may have served another model since this one was traced.
        for optimizer in self.optimizers:
            optimizer.exchange.absence.watch(wanted)
        before, self._watches_absence = self._watches_absence, wanted
        return before != wanted

    def weigh_alike(self, wanted: bool) -> bool:
        """Tells optimizers that accumulate whether all batches of all ranks have as many rows.

        Args:
          wanted: True if they have; the same on all ranks.

        Returns:
          True if the step has to be traced anew.
        """
        accumulating = [one for one in self.optimizers if one.gradient_accumulation_steps]
        for optimizer in accumulating:
            optimizer.exchange.batch.are_equal = wanted
        before, self._weighs_alike = self._weighs_alike, wanted
        return bool(accumulating) and before != wanted

    @contextlib.contextmanager
    def weighing_as_agreed(self) -> Iterator[None]:
        """Lets steps of `fit` weigh as ranks agree; batches outside of it may have other rows."""
        left = self._model.train_function
        if isinstance(left, OutsideOfFit):
            self._model.train_function = left.train
            self.weigh_alike(True)
        try:
            yield
        finally:
            self._stop_skipping()
            if self.weigh_alike(False):
                self._model.train_function = OutsideOfFit(self._model)

    @property
    def watches_absence(self) -> bool:
        """True if steps tell whether ranks are out of data."""
        return self._watches_absence

    @property
    def steps_executed(self) -> int:
        """Train steps so far, where they are counted."""
        return 0 if self._step_counter is None else int(self._step_counter.numpy())

    @property
    def steps_done(self) -> tuple[int, int]:
        """Train steps so far, and exchanges of all ranks, counted while absence is watched."""
        return self.steps_executed, sum(
            optimizer.exchange.absence.complete for optimizer in self._watched
        )

    @property
    def absent_ranks(self) -> int:
        """Number of ranks that had no batch left at the last step, while absence is watched."""
        return max(optimizer.exchange.absence.ranks for optimizer in self._watched)

    def finish_epoch(self) -> None:
        """Contributes zeros to the other ranks' steps until all ranks are done with the epoch.

        Where this rank is out of data in the middle of an update, what was accumulated for it is
        dropped on every rank.

        Raises:
          RuntimeError: If this rank has done no step, so that it does not know what to contribute
            to.
        """
        eagerly = self._model.run_eagerly
        # A step may exchange several times.
        hooks = [hook for optimizer in self._watched for hook in optimizer.join_hooks()]
        if not hooks:
            raise RuntimeError(
                "A rank without a single batch cannot end an epoch. Give every rank data."
            )
        others_went_on = join_until_all_have_ended(hooks, eagerly)
        were_absent = others_went_on or self.absent_ranks
        for optimizer in self._watched:
            optimizer.exchange.absence.forget()
            abandon = optimizer.fit_hooks(self._model).abandon_update
            if were_absent and abandon is not None:
                abandon()


def _check_is_in_step(optimizer: Any, model: Any) -> None:
    """Refuses to find an optimizer in its first step that `fit` should have known before."""
    if not optimizer.fit_hooks(model).is_in_step:
        raise ValueError(
            "An optimizer by which each rank trains its own weights must be an attribute of its "
            f"model, or an item of a list or dictionary there. Received: {optimizer.name!r}, which "
            f"was found only in its first step of {model.name!r}. Assign it to an attribute of the "
            "model before fit."
        )


def _refuse_synchronized(model: Any) -> None:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise ValueError(
                "A rank normalizes its samples by the statistics of its own batch. Received: "
                f"{layer.name!r}, a BatchNormalization(synchronized=True). Leave `synchronized` "
                "out: keras_callbacks.AverageBatchNorm() averages the moving statistics. For few "
                "samples on each rank, use GroupNormalization."
            )


def _check_variables_are_apart(model: Any, optimizers: list[Any]) -> None:
    """Refuses optimizers that exchange weights and have some of them in common.

    Each would take what the other has moved for the updates of this rank.
    """
    owners: dict[int, Any] = {}
    for optimizer in optimizers:
        if not optimizer.built or optimizer.fit_hooks(model).is_in_step:
            continue
        for variable in optimizer._trainable_variables:
            other = owners.setdefault(id(variable), optimizer)
            if other is not optimizer:
                raise ValueError(
                    "Weights have one centre. Received: "
                    f"{variable.path!r}, which both {other.name!r} and {optimizer.name!r} of this "
                    "model train. Give each variable one optimizer, and delete the attribute of "
                    "the model that holds one that trains no more."
                )


def of(model: keras.Model) -> Session:
    """Returns the model's session, made at the first call.

    Args:
      model: A Keras model.
    """
    session = getattr(model, "_tfposeidon_session", None)
    if session is None:
        session = model._tfposeidon_session = Session(model)
    return session
