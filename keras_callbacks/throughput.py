"""Reports samples per second, bytes sent, and communication that computation does not hide."""

from __future__ import annotations

import time
from typing import Any

import keras
from typing_extensions import override

from keras_callbacks._tensorboard import ScalarWriter
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.training import session
from tfposeidon.training.global_metrics import samples_seen
from tfposeidon.training.session import optimizers_of


class Throughput(keras.callbacks.Callback):
    """Adds the training speed to the logs of each epoch, and to TensorBoard.

    All ranks exchange their measurements at the end of the epoch and report the same numbers:

    - `samples_per_second`: samples of all ranks together, over the time of the slowest rank. It is
      left out for models that override `metrics`, or do not update Keras's loss tracker.
    - `exposed_communication`: share of the time, in [0, 1], in which a step waited for its exchange
      after its last gradient; mean over ranks. 0 without a communicating optimizer. On GPUs, where
      ops are queued, it is only an indication.
    - `megabytes_sent`: payload that rank 0 sends per step, as the plan predicts; with one exchange
      in several steps, the mean over these steps.

    The first step of an epoch is excluded, because the very first one traces and compiles; so is
    validation. An epoch of one step reports no `samples_per_second`.

    Args:
      log_dir: Folder in which the first rank that trains writes the scalars
        `throughput/samples_per_second` and so on; `None` (default) writes none.

    Cost: two exchanges of a few bytes per rank and epoch, and up to five clock ops per step. The
    step of a model that was trained before without this callback is traced once more.

    >>> import keras_callbacks
    >>> callbacks = [keras_callbacks.Throughput(log_dir="logs"), keras_callbacks.MetricAverage()]
    """

    def __init__(self, log_dir: str | None = None) -> None:
        super().__init__()
        self.log_dir = log_dir
        self._scalars = ScalarWriter(log_dir)
        # Seconds, samples and seconds of exposed communication: after the first step, and for all
        # later steps. Steps sum the last one in a variable of `optimizer.exchange`.
        self._begin: tuple[float, float, float] | None = None
        self._spent: list[float] = [0.0, 0.0, 0.0]

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._scalars.open()
        untimed = [one for one in optimizers_of(self.model) if not one.exchange.is_timed]
        for optimizer in untimed:
            optimizer.exchange.is_timed = True
        if untimed:
            session.of(self.model).retrace()

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin = None
        self._spent = [0.0, 0.0, 0.0]

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if session.of(self.model).was_skipped:
            return
        if self._begin is None:
            self._begin = self._now()
        # At the end of the epoch, this rank may have waited for others that validate.
        self._last_s = time.perf_counter()

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        self._end_training()

    @override
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_training()
        ranks = exchange_objects(self._spent, session.of(self.model).wire, "tp.throughput")
        slowest_s = max(seconds for seconds, _, _ in ranks)
        if logs is None or slowest_s <= 0:
            return
        exposed = [exposed_s / (seconds or 1.0) for seconds, _, exposed_s in ranks]
        speed = {
            "exposed_communication": sum(exposed) / len(ranks),
            "megabytes_sent": self._bytes_sent() / 1e6,
        }
        if samples := sum(samples for _, samples, _ in ranks):
            speed = {"samples_per_second": samples / slowest_s, **speed}
        logs.update(speed)
        self._scalars.write({f"throughput/{name}": value for name, value in speed.items()}, epoch)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._scalars.close()

    def _end_training(self) -> None:
        # Runs before validation, for which Keras resets its loss tracker, and only once per epoch.
        if self._begin is not None:
            now = (self._last_s, *self._now()[1:])
            self._spent = [end - begin for end, begin in zip(now, self._begin, strict=True)]
            self._begin = None

    def _now(self) -> tuple[float, float, float]:
        # An optimizer that was found in its first step has no clocks.
        timed = [one for one in optimizers_of(self.model) if one.exchange.is_timed]
        exposed_s = sum(optimizer.exposed_s for optimizer in timed)
        return time.perf_counter(), samples_seen(self.model) or 0.0, exposed_s

    def _bytes_sent(self) -> float:
        built = [optimizer for optimizer in optimizers_of(self.model) if optimizer.built]
        own = sum(optimizer.bytes_per_step for optimizer in built)
        # Ranks on nodes of unequal sizes send unequal amounts; all ranks report that of rank 0.
        return exchange_objects(own, session.of(self.model).wire, "tp.bytes")[0]
