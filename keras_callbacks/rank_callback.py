"""Provides the base class of callbacks that communicate, which detects models without an exchange.

`fit` compares replicas only for communicating optimizers. A script that by mistake does not wrap
its optimizer may still pass callbacks of this package.
"""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon.communication import launcher, runtime
from tfposeidon.training import entries, session


class RankCallback(keras.callbacks.Callback):
    """Keras callback that compares replicas after the first step if no optimizer communicates."""

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        own, optimizer = session.of(self.model), getattr(self.model, "optimizer", None)
        # Compare once, even if a model has several of these callbacks.
        if own.compared is not optimizer and not own.was_skipped:
            own.compared = optimizer
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        # A single process needs no launcher. With a communicating optimizer, `fit` compares values.
        if launcher.process_rank().size == 1 or session.optimizers_of(self.model):
            return
        if problem := entries.difference(self.model, runtime.wire()):
            raise RuntimeError(
                f"{problem} No optimizer of this model communicates, so nothing of this model is "
                "exchanged. Use compile(tfposeidon.DistributedOptimizer(optimizer), ...)."
            )
