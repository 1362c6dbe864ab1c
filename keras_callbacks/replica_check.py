"""Periodically compares the replicas of a model bit by bit."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon import checks
from tfposeidon.communication import runtime
from tfposeidon.exchange import replicas
from tfposeidon.state.placement import Placement
from tfposeidon.training import entries, session
from tfposeidon.training.entries import replicated_variables

ACTIONS = ("stop", "repair", "report")


class ReplicaCheck(keras.callbacks.Callback):
    """Compares checksums of weights, optimizer state and other layer state between ranks.

    Exchanges produce the same bits on every rank. Replicas can still diverge because of faulty
    hardware, or because a script runs some code only on some ranks. All ranks take part in each
    check.

    Args:
      every_n_steps: Number of steps between checks, at least 1 (default 1000).
      action: Response to a difference: `"stop"` (default) raises an error on all ranks; `"repair"`
        logs the difference on rank 0 and broadcasts the values of rank 0; `"report"` only logs it.
        With `"report"`, comparisons by `fit` itself also log differences instead of raising errors.

    Raises:
      ValueError: If an argument is invalid.
      RuntimeError: In `fit`, on all ranks, with `action="stop"`; the message names the first
        variable that differs and the ranks.

    Cost: each check reads all of this state once, and exchanges a checksum for each variable.

    >>> import keras_callbacks
    >>> callbacks = [keras_callbacks.ReplicaCheck(every_n_steps=500, action="report")]
    """

    def __init__(self, every_n_steps: int = 1000, action: str = "stop") -> None:
        super().__init__()
        checks.check_number("every_n_steps", every_n_steps, checks.AT_LEAST_1)
        if action not in ACTIONS:
            raise ValueError(
                f"`action` must be one of {', '.join(ACTIONS)}. Received: action={action!r}. Leave "
                'it out for "stop".'
            )
        self.every_n_steps = every_n_steps
        self.action = action
        self._steps = 0

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        session.of(self.model).check_in_step(f"ReplicaCheck(every_n_steps={self.every_n_steps})")
        session.of(self.model).only_reports |= self.action == "report"

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # A call covers `steps_per_execution` steps, so a check may be due within a call.
        before, self._steps = self._steps, self._steps + self.model.steps_per_execution
        if self._steps // self.every_n_steps > before // self.every_n_steps:
            with session.of(self.model).global_weights(assign=True):
                self._check()

    def _check(self) -> None:
        variables = replicated_variables(self.model)
        wire = session.of(self.model).wire
        layers = entries.read_layers(self.model, Placement.REPLICATED)
        found = replicas.differences(variables, layers, wire)
        if not found:
            return
        path, ranks = next(iter(found.items()))
        problem = (
            f"Replicas must be equal bit by bit. After {self._steps} steps, {len(found)} of "
            f"{len(variables) + len(layers)} variables and layer states differ. The first is "
            f"{path!r}, which differs on rank(s) {ranks} from rank 0."
        )
        if self.action == "stop":
            raise RuntimeError(
                f'{problem} Use ReplicaCheck(action="repair") to continue with rank 0\'s values.'
            )
        repairs = self.action == "repair"
        runtime.log_once(
            "tfposeidon: %s%s",
            problem,
            " All ranks receive the values of rank 0." if repairs else "",
        )
        if repairs:
            replicas.broadcast(variables, wire)
            entries.broadcast_layers(self.model, wire)
