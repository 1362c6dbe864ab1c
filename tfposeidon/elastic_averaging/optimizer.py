"""Provides `ElasticAveraging`: workers exchange weights with a server, each at its own pace.

Think of a Keras optimizer around an inner optimizer: each step updates a worker's weights. Every
`sync_every` steps, the worker's weights and the server's global weights move toward each other.
"""

from __future__ import annotations

import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import checks, communicating, policies
from tfposeidon.communicating import CommunicatingOptimizer, build_inner, check_built
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire, pack, unpack
from tfposeidon.elastic_averaging import fit, job
from tfposeidon.elastic_averaging.calls import Worker
from tfposeidon.exchange.plan import Plan
from tfposeidon.exchange.step import Step
from tfposeidon.gradients import describe, with_merged_rows
from tfposeidon.optimizers.wrapper import rates, settings, slots, step_counter
from tfposeidon.state.placement import Placement, StateDescription
from tfposeidon.text import readable_size
from tfposeidon.training import entries
from tfposeidon.training.hooks import FitHooks

# By default, the number of workers times alpha is this value, as in Zhang et al. 2015.
_BETA = 0.9


@keras.saving.register_keras_serializable("tfposeidon")
class ElasticAveraging(CommunicatingOptimizer):
    """Optimizer for asynchronous workers that exchange weights with a server (EASGD).

    Every `sync_every` steps, a worker exchanges its weights `x` with the server's global weights
    `c` (the center): the worker adds `-alpha (x - c)`, and the server adds `server_alpha (x - c)`.
    Workers do not wait for each other. One rank is the server and does not train: call
    `tfposeidon.init(server_rank=0)` first. All ranks run the same script. On the server, `fit`
    evaluates the global weights on `validation_data` when workers have ended an epoch on average,
    and callbacks that save or stop run there. After `fit`, all ranks hold the global weights. The
    synchronous form needs no server: `LocalUpdates(outer_optimizer=tfposeidon.local.Elastic())`.

    Args:
      inner_optimizer: A Keras optimizer that is not wrapped. It updates a worker's weights at every
        step, and its state is local to the worker. At the end of an epoch, workers send the state
        to the server. A resumed run starts with the average over workers.
      sync_every: Number of a worker's steps between exchanges, at least 1 (default 4).
      alpha: Share of the difference `x - c` that a worker subtracts from its weights in an
        exchange, above 0 and at most 1; `None` (default) for 0.9 / workers.
      server_alpha: Share of the difference `x - c` that the server adds to the global weights,
        above 0 and at most 1; `None` (default) for `alpha`.
      name: Name of the optimizer (default `"elastic_averaging"`).
      **others: Any other arguments, which are all refused.

    Raises:
      TypeError: For unknown arguments.
      ValueError: If an argument is out of its range, if the inner optimizer averages weights
        (`use_ema`), under `tf.distribute`, or with another Keras backend than TensorFlow. `fit`
        also raises it in a job of one rank, or without a server.

    Cost: an exchange sends weights and averaged statistics once in each direction, as float32. At
    the end of an epoch, a worker sends the inner optimizer's state to the server. The server stores
    an additional copy of weights and optimizer state. During an exchange, the server needs one more
    copy of the weights, and the worker two.

    Source: Zhang, Choromanska and LeCun 2015 (asynchronous EASGD; EAMSGD with momentum in the inner
    optimizer); Theano-MPI section 4, with separate alphas of server and workers.

    Example:
      >>> import keras, tfposeidon as tp
      >>> optimizer = tp.ElasticAveraging(keras.optimizers.SGD(0.1, momentum=0.9), alpha=0.5)
      >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
      >>> model.compile(optimizer=optimizer, loss="mse")
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        sync_every: int = 4,
        alpha: float | None = None,
        server_alpha: float | None = None,
        *,
        name: str | None = None,
        **others: Any,
    ) -> None:
        communicating.check_no_more_arguments("ElasticAveraging", others)
        checks.check_integer("sync_every", sync_every, 1)
        for argument, value in (("alpha", alpha), ("server_alpha", server_alpha)):
            if value is not None:
                checks.check_number(argument, value, checks.FRACTION)
        policy = policies.parse("allreduce")
        super().__init__(
            inner_optimizer,
            policy,
            bucket_bytes=None,
            sample_count=None,
            gradient_accumulation_steps=None,
            name=name or "elastic_averaging",
        )
        communicating.check_no_averages("ElasticAveraging", inner_optimizer)
        self._every, self._alpha, self._server_alpha = sync_every, alpha, server_alpha
        # Use this `Step` for the plan only, because exchanges use the communicator of a pair.
        self._exchange = Step(self, policy, None, None, _pair_of_plan)
        self._statistics: Callable[[], Sequence[Any]] = list
        self._worker: Worker | None = None
        self._number = self._length = self._sent_steps = 0
        self._waited_s = 0.0

    # ------------------------------------------------------------------ state

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's state.

        Args:
          variables: The trainable variables.

        Raises:
          ValueError: If a variable is not floating point.
        """
        # Keras passes no variables when it loads an .h5 file.
        if self.built or not variables:
            return
        build_inner(self.inner_optimizer, variables)
        # Place the counter on the CPU, because Python code and conditions in graphs read it.
        with tf.init_scope(), tf.device("/CPU:0"):
            zero = tf.zeros([], tf.int64)
            self._since = tf.Variable(zero, trainable=False, name="steps_since_exchange")
        self._exchange.build()
        self._adopt(variables)

    @property
    @override
    def variables(self) -> list[Any]:
        """Variables of the inner optimizer; on the server, they hold the workers' average state."""
        return list(self.inner_optimizer.variables)

    @property
    @override
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        return []

    @override
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for saving with the model."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "sync_every": self._every,
            "alpha": self._alpha,
            "server_alpha": self._server_alpha,
        }

    @property
    def alpha(self) -> float:
        """Share of `x - c` that a worker subtracts from its weights `x` in an exchange.

        Raises:
          RuntimeError: If the share depends on the number of workers, and the job has not started.
        """
        if self._alpha is not None:
            return self._alpha
        job.check_begun()
        return _BETA / max(runtime.workers().size, 1)

    @property
    def server_alpha(self) -> float:
        """Share of `x - c` that the server adds to the global weights `c` in an exchange.

        Raises:
          RuntimeError: If the share depends on the number of workers, and the job has not started.
        """
        return self.alpha if self._server_alpha is None else self._server_alpha

    @property
    def agreed_settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks."""
        # Learning rates may differ, because callbacks set them, and a resumed server sends the
        # learning rate of its snapshot to workers.
        inner = {
            name: value
            for name, value in settings(self.inner_optimizer, "inner optimizer").items()
            if not (name.endswith(".learning_rate") and isinstance(value, float))
        }
        own = {"sync_every": self._every, "alpha": self.alpha, "server_alpha": self.server_alpha}
        return own | inner

    @property
    @override
    def plan(self) -> Plan:
        """Communication plan of an exchange between a worker and the server, with bytes and memory.

        Raises:
          RuntimeError: If the optimizer is not built, or the job has not started.
        """
        check_built(self)
        # Exchanges convert all variables to float32.
        described = [
            dataclasses.replace(describe(variable), dtype="float32")
            for variable in self.exchanged_variables
        ]
        plan = self._exchange.plans.planner.plan(described)
        if runtime.server_rank() is None:
            return plan
        length = sum(d.bytes for d in plan.descriptions)
        state_bytes = 4 * sum(math.prod(variable.shape) for variable in self.sent_variables)
        notes = [
            f"a worker and the server exchange weights once in {self._every} steps of the worker: "
            f"{readable_size(plan.cost.bytes / self._every)} per step in each direction; alpha "
            f"{self.alpha:g}, server alpha {self.server_alpha:g}",
            *job.notes_of_layout(length / self._every),
            f"at the end of an epoch a worker sends {readable_size(state_bytes)} of optimizer "
            "state",
            f"memory during exchanges: on the server 2 x {readable_size(length)} for weights and "
            f"3 x {readable_size(state_bytes)} for optimizer state, on a worker 2 x both",
            "workers' weights and global weights differ; results depend on the order in which "
            "workers exchange",
        ]
        return dataclasses.replace(plan, occasion="exchange", notes=(*notes, *plan.notes))

    # ------------------------------------------------------------------ steps

    @override
    def _step(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        communicating.check_all_variables("ElasticAveraging", variables, self._trainable_variables)
        job.check_roles()
        runtime.check_graph()
        if job.is_server():
            raise RuntimeError(
                f"The server must not train. Received: a step on rank {runtime.rank()}, which is "
                "the server. Train with fit, or within ElasticAveraging.run on all ranks."
            )
        self.updater.apply(with_merged_rows(grads), variables)
        # Count calls instead of updates, because loss scaling may skip updates.
        self._since.assign_add(1)
        tf.cond(self._since >= self._every, self._exchange_now, lambda: None)

    def _exchange_now(self) -> None:
        finite = [tf.reduce_all(tf.math.is_finite(v)) for v in self.exchanged_variables]
        tf.cond(tf.reduce_all(finite), self._swap, self._restart_from_center)
        self._since.assign(0)

    def _restart_from_center(self) -> None:
        # The worker retains its learning rates, because callbacks may have set them.
        of_rates = rates(self.inner_optimizer)
        before = [tf.identity(rate) for rate in of_rates]
        self.take_all()
        for rate, value in zip(of_rates, before, strict=True):
            rate.assign(value)

    def _swap(self) -> None:
        variables = self.exchanged_variables
        values = pack(variables)
        difference = tf.py_function(self._swap_values, [values], tf.float32)
        parts = unpack(tf.ensure_shape(difference, values.shape), variables)
        # Each worker keeps its own statistics.
        for variable, part in zip(self._trainable_variables, parts, strict=False):
            variable.assign_sub(self.alpha * part)

    def _swap_values(self, values: tf.Tensor) -> tf.Tensor:
        link = self._link()
        if len(values) != self._length:
            raise RuntimeError(
                "A step must exchange the variables that the job started with. Received: a step "
                f"that was traced with {len(values)} values, in a job that exchanges "
                f"{self._length}. Pass all trained models to run, run(train, models=[...]), and "
                "compile them again after a fit."
            )
        begin_s = time.perf_counter()
        difference = link.swap(self._number, values)
        self._waited_s += time.perf_counter() - begin_s
        return difference

    def _link(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(
                "A step must run within fit or ElasticAveraging.run, because only these start "
                "the server. Received: a step outside of both. Call fit or run(train) on all ranks."
            )
        return self._worker

    def run(
        self,
        train: Callable[[], Any],
        *,
        others: Sequence[ElasticAveraging] = (),
        models: Sequence[keras.Model] = (),
        on_failure: Callable[[], Any] | None = None,
    ) -> None:
        """Trains with a custom loop: workers run `train` and exchange weights with the server.

        All ranks must call `run` together. They start with the server's weights. Afterwards, all
        ranks hold the final global weights. To evaluate or save the global weights in between, call
        `run` once per epoch; workers then wait for each other at the end of each call.

        Args:
          train: Function without arguments that runs a worker's steps.
          others: Further optimizers with steps in `train`, as for a GAN's generator.
          models: Models whose layer statistics, such as moving means, are part of the global
            weights. Statistics of other models are local to each rank.
          on_failure: Function without arguments, such as one that saves the models. The server
            calls it with the global weights in the variables if a worker is lost, if the server
            fails, or on SIGTERM.

        Raises:
          ValueError: In a job of one rank, without a server, or if an optimizer is not built or is
            not an `ElasticAveraging`.
          RuntimeError: If ranks differ in their variables, settings or models.

        Example:
          Within a script that `horovodrun` has started on several ranks:

              tp.init(server_rank=0)
              optimizer = tp.ElasticAveraging(keras.optimizers.SGD(0.1))
              optimizer.build(model.trainable_variables)
              optimizer.run(lambda: train_epochs(model, optimizer, my_data), models=[model])
        """
        optimizers = [self, *others]
        for optimizer in optimizers:
            if not isinstance(optimizer, ElasticAveraging) or not optimizer.built:
                raise ValueError(
                    "The server requires built ElasticAveraging optimizers, to store the global "
                    f"weights of their variables. Received: {optimizer.name!r}, a "
                    f"{type(optimizer).__name__} that is "
                    f"{'built' if optimizer.built else 'not built'}. Use ElasticAveraging, and "
                    "call optimizer.build(variables) first."
                )
        # As in `fit`, only one optimizer exchanges statistics.
        for optimizer in others:
            optimizer._set_statistics(list)
        self._set_statistics(
            lambda: [v for model in models for v in entries.variables_of(model, Placement.AVERAGED)]
        )
        job.check_roles()
        job.begin(optimizers, models, {})
        job.run(optimizers, train, on_failure)

    @property
    @override
    def exposed_s(self) -> float:
        """Seconds that this worker's exchanges have taken so far."""
        return self._waited_s

    @property
    @override
    def bytes_per_step(self) -> float:
        return super().bytes_per_step / self._every

    @override
    def check_change(self, policy: policies.Policy) -> None:
        raise ValueError(
            "ElasticAveraging does not support a change of the scheme. Received: "
            f"scheme={policy}. Use LocalUpdates(outer_optimizer=tfposeidon.local.Elastic()), "
            "which supports any scheme."
        )

    # ------------------------------------------------------------------ roles

    @override
    def fit_hooks(self, model: Any) -> FitHooks:
        reference = weakref.ref(model)
        self._set_statistics(lambda: entries.statistics_of(reference(), self))
        return FitHooks(run=fit.run, wire=runtime.own_wire, is_in_step=False)

    def _set_statistics(self, statistics: Callable[[], Sequence[Any]]) -> None:
        # The server's center has a fixed length after the start.
        if self._worker is None:
            self._statistics = statistics

    @property
    def exchanged_variables(self) -> list[Any]:
        """Variables whose values are exchanged: trained variables, then statistics."""
        return [*self._trainable_variables, *self._statistics()]

    @property
    def sent_variables(self) -> list[Any]:
        """Optimizer state, learning rates and the step counter, which bias correction uses."""
        # All are sent as float32, in which the counter is exact up to 2**24 steps.
        inner = self.inner_optimizer
        return [*slots(inner), *rates(inner), step_counter(inner)]

    def check_detached(self) -> None:
        """Refuses to start if steps already exchange weights, as in `fit` within `run`."""
        if self._worker is not None:
            raise RuntimeError(
                "Training with the server must end before it starts again. Received: "
                f"{self.name!r}, which still trains with the server. Do not call fit or run within "
                "run, because both run the server; after an error, restart the job."
            )

    def attach(self, worker: Worker, number: int) -> None:
        """Makes steps exchange weights with the server's center of index `number`."""
        self._worker, self._number = worker, number
        self._length = sum(math.prod(v.shape) for v in self.exchanged_variables)
        self._sent_steps = int(step_counter(self.inner_optimizer).numpy())
        self._since.assign(0)

    def exchange_last(self) -> None:
        """Exchanges weights once more if steps followed the last exchange."""
        if int(self._since.numpy()):
            self._exchange_now()

    def send_state(self) -> None:
        """Sends the optimizer state to the server if steps changed it since the last transfer."""
        state, steps = pack(self.sent_variables), int(step_counter(self.inner_optimizer).numpy())
        # Non-finite values would persist in the server's average.
        if steps != self._sent_steps and tf.reduce_all(tf.math.is_finite(state)):
            self._link().send_state(self._number, state)
            self._sent_steps = steps

    def take_all(self) -> None:
        """Assigns the server's global weights and optimizer state to this worker's variables."""
        values, state = tf.py_function(
            lambda: self._link().take(self._number), [], [tf.float32, tf.float32]
        )
        job.assign_parts(self.exchanged_variables, values)
        job.assign_parts(self.sent_variables, state)

    def detach(self) -> None:
        self._worker = None


def _pair_of_plan() -> Wire:
    job.check_begun()
    if runtime.server_rank() is None:
        return runtime.own_wire()
    workers = runtime.workers().ranks
    return runtime.pair_wire(workers[0] if job.is_server() else runtime.rank())
