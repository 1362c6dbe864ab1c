"""Reports samples per second, bytes sent, and communication that does not overlap computation."""

from __future__ import annotations

import time
from typing import Any

from typing_extensions import override

from keras_callbacks.rank_callback import RankCallback
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.training import session
from tfposeidon.training.global_metrics import samples_seen


class Throughput(RankCallback):
    """Adds the training speed to the logs of each epoch.

    All ranks exchange their measurements at the end of the epoch and report the same numbers:

    - `samples_per_second`: samples of all ranks together, divided by the time of the slowest rank.
      It is omitted for models that override `metrics` or do not update Keras's loss tracker.
    - `exposed_communication`: share of the time, in [0, 1], for which steps waited for their
      exchange after the last gradient; mean over ranks. It is 0 without a communicating optimizer,
      and approximate on GPUs, where ops are queued.
    - `megabytes_sent`: payload that rank 0 sends per step, as the plan predicts; with one exchange
      in several steps, the mean over these steps.

    Times exclude validation, and the first step of each epoch, because the first step of training
    traces and compiles. An epoch of one step reports only `megabytes_sent`, because no time
    remains. An epoch without a step reports nothing.

    Later callbacks in the list, such as `keras.callbacks.TensorBoard`, receive these logs.

    Cost: one exchange of about 100 bytes per rank and epoch, and up to five clock ops per step. The
    step of a model that was trained before without this callback is traced once more.

    >>> import keras, keras_callbacks
    >>> callbacks = [keras_callbacks.Throughput(), keras.callbacks.TensorBoard()]
    """

    # `_begin` has the totals after the first step of the epoch, `_last_s` is the time at which the
    # last step ended, and `_increase` is the increase of the totals in between.
    _begin: dict[str, float] | None = None
    _last_s: float | None = None
    _increase: dict[str, float] | None = None

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        untimed = [one for one in session.optimizers_of(self.model) if not one.exchange.is_timed]
        for optimizer in untimed:
            optimizer.exchange.is_timed = True
        if untimed:
            session.of(self.model).retrace()

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin = self._last_s = self._increase = None

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        if session.of(self.model).was_skipped:
            return
        if self._begin is None:
            self._begin = self._totals()
        else:
            # Read the clock here, because at the end of the epoch ranks may wait for validation.
            self._last_s = time.perf_counter()

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        self._end_training()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_training()
        optimizers = session.optimizers_of(self.model)
        bytes_sent = sum(one.bytes_per_step for one in optimizers if one.built)
        has_trained = self._begin is not None or self._increase is not None
        own = {"bytes_sent": bytes_sent, "has_trained": has_trained, "increase": self._increase}
        ranks = exchange_objects(own, session.of(self.model).wire, "tp.throughput")
        if not any(rank["has_trained"] for rank in ranks):
            # The rank is a server of `ElasticAveraging`, or all batches of the epoch were skipped.
            return
        timed = [rank["increase"] for rank in ranks if rank["increase"]]
        if samples := sum(one["samples"] for one in timed):
            logs["samples_per_second"] = samples / max(one["seconds"] for one in timed)
        if timed:
            shares = [one["exposed_s"] / one["seconds"] for one in timed]
            logs["exposed_communication"] = sum(shares) / len(timed)
        # Report the bytes of rank 0, because ranks on nodes of unequal sizes send unequal bytes.
        logs["megabytes_sent"] = ranks[0]["bytes_sent"] / 1e6

    def _end_training(self) -> None:
        # Read the totals before validation, for which Keras resets its loss tracker.
        if self._begin is not None and self._last_s is not None:
            end = {**self._totals(), "seconds": self._last_s}
            self._increase = {name: end[name] - begin for name, begin in self._begin.items()}
            self._begin = None

    def _totals(self) -> dict[str, float]:
        timed = [one for one in session.optimizers_of(self.model) if one.exchange.is_timed]
        # Read the exposed seconds before the clock, because on GPUs the read waits for the step.
        exposed_s = sum(optimizer.exposed_s for optimizer in timed)
        samples = samples_seen(self.model) or 0.0
        return {"seconds": time.perf_counter(), "samples": samples, "exposed_s": exposed_s}
