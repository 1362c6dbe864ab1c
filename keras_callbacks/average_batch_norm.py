"""Averages moving statistics of layers over ranks, and sums partial state."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from keras_callbacks.rank_callback import RankCallback
from tfposeidon.training import global_metrics, session


class AverageBatchNorm(global_metrics.LayerAverages, RankCallback):
    """Averages the moving statistics of layers over ranks.

    `fit` averages statistics automatically for optimizers of `tfposeidon`. Use this callback for
    other optimizers, with `synchronize_model=False`, or in `model.evaluate`.

    In training, the `BatchNormalization` layers of a rank see only the batches of this rank, so
    moving statistics differ between ranks, and without averaging, ranks would evaluate and save
    different models. The same applies to floating-point variables of other layers that receive no
    gradient, such as codebooks (`tp.state.register` changes this). The callback runs before each
    evaluation and otherwise at the end of each epoch. All ranks take part, and hold the same
    averages afterwards; equal values are unchanged. For state registered as partial, rank 0
    receives the sum over ranks at the end of the epoch, and all other ranks receive zeros.

    Put this callback before `MetricAverage` and `Checkpoint`.

    Cost: a checksum of these variables, and one all-reduce if they differ, 4 bytes per element.

    >>> import keras_callbacks
    >>> callbacks = [keras_callbacks.AverageBatchNorm(), keras_callbacks.MetricAverage()]
    """

    _is_done_by_fit = False

    @override
    def set_params(self, params: Any) -> None:
        # Reset here, because `fit` and `evaluate` call this hook first, even after an interruption.
        super().set_params(params)
        self._is_due, self._is_done_by_fit = True, False

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        hooks = session.of(self.model).hooks
        self._is_done_by_fit = bool(hooks) and all(one.synchronizes_model for one in hooks)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._is_done_by_fit:
            super().on_epoch_end(epoch, logs)

    @override
    def _average(self) -> None:
        # If `fit` averages and only some ranks validate, this average would wait for other ranks.
        if not self._is_done_by_fit:
            super()._average()
