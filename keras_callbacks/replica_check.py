"""Periodically compares the replicas of a model bit by bit."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from keras_callbacks.rank_callback import RankCallback
from tfposeidon import checks
from tfposeidon.communication import runtime
from tfposeidon.exchange import replicas
from tfposeidon.training import entries, session

ACTIONS = ("stop", "repair", "report")


class ReplicaCheck(RankCallback):
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

    Cost: each check reads all of this state once, and exchanges a checksum.

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
        super().on_train_batch_end(batch, logs)
        # A call covers `steps_per_execution` steps, so a check may be due within a call.
        before, self._steps = self._steps, self._steps + self.model.steps_per_execution
        if self._steps // self.every_n_steps > before // self.every_n_steps:
            with session.of(self.model).global_weights(assign=True):
                self._check()

    def _check(self) -> None:
        wire = session.of(self.model).wire
        found = entries.difference(self.model, wire, with_layers=True)
        if found is None:
            return
        problem = f"After {self._steps} steps: {found}"
        if self.action == "stop":
            raise RuntimeError(
                f'{problem} Use ReplicaCheck(action="repair") to continue with rank 0\'s values.'
            )
        if self.action == "repair":
            problem += " All ranks receive the values of rank 0."
            replicas.broadcast(entries.replicated_variables(self.model), wire)
            entries.broadcast_layers(self.model, wire)
        runtime.log_once("tfposeidon: %s", problem)
