"""Starts all ranks with the same model."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from keras_callbacks.rank_callback import RankCallback
from tfposeidon.communication import runtime
from tfposeidon.training import entries


class BroadcastVariables(RankCallback):
    """Broadcasts the model and optimizer state of one rank when training begins.

    The broadcast includes moving statistics, frozen weights, and the state that preprocessing
    layers of the model have adapted outside of variables: statistics, bins, vocabularies. Each rank
    derives different seeds from the seeds of the root rank, because samples of two ranks would
    otherwise share dropout masks and augmentation. Layers outside of the model, for example in a
    `tf.data` pipeline, are not included: adapt them to the same data on every rank. State that
    differs between ranks by design, such as the residuals of sparse schemes, is unchanged.

    Put this callback first, so that a later `Checkpoint` restores the state of each rank.

    Args:
      root_rank: Rank that broadcasts its state (default 0); the same on every rank.

    Raises:
      RuntimeError: In `fit`, on all ranks, if the model has no weights yet, or if ranks built
        different models; the message names the first variable that differs.
      RuntimeError: After the first step or an epoch, on all ranks, if their weights have diverged
        because none of the model's optimizers communicates.
      ValueError: In `fit`, on all ranks, if layers hold tables that differ and cannot be assigned.

    Cost: one broadcast per variable, once per `fit`.

    >>> import keras_callbacks
    >>> callbacks = [keras_callbacks.BroadcastVariables()]
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._compare_replicas()

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        entries.broadcast_state(self.model, runtime.wire(), self.root_rank)
