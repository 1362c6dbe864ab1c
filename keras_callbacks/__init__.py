"""Keras callbacks for training on many ranks.

Pass the same callbacks to `fit` on every rank: most of them communicate, and a rank without the
callback would leave the others waiting. On one rank, callbacks need no launcher.

With an optimizer of `tfposeidon`, `fit` automatically starts all ranks with equal values, and
averages metrics and moving statistics. `BroadcastVariables`, `AverageBatchNorm` and `MetricAverage`
are for other cases. If no optimizer of a model communicates, callbacks that communicate compare the
weights and state of all ranks after the first step, and raise `RuntimeError` if they differ.

The order in the list matters. Begin with `BroadcastVariables`, `AverageBatchNorm` and
`MetricAverage`. Keras callbacks that depend on metrics (`EarlyStopping`, `ReduceLROnPlateau`)
follow, and then `GatherState` and callbacks that save. `Checkpoint` is last.

>>> import keras, keras_callbacks
>>> callbacks = [
...     keras_callbacks.LearningRateWarmup(0.8, warmup_epochs=5),
...     keras.callbacks.EarlyStopping("val_loss", patience=3),
...     keras_callbacks.Checkpoint("/data/checkpoints"),
... ]
"""

from keras_callbacks.average_batch_norm import AverageBatchNorm
from keras_callbacks.broadcast_variables import BroadcastVariables
from keras_callbacks.cache_position import CachePosition
from keras_callbacks.cache_statistics import CacheStatistics
from keras_callbacks.checkpoint import Checkpoint
from keras_callbacks.gather_state import GatherState
from keras_callbacks.learning_rate_schedule import LearningRateSchedule
from keras_callbacks.learning_rate_warmup import LearningRateWarmup
from keras_callbacks.metric_average import MetricAverage
from keras_callbacks.progressive_resize import Phase, ProgressiveResize
from keras_callbacks.replica_check import ReplicaCheck
from keras_callbacks.scheme_schedule import SchemeSchedule
from keras_callbacks.throughput import Throughput

__all__ = [
    "AverageBatchNorm",
    "BroadcastVariables",
    "CachePosition",
    "CacheStatistics",
    "Checkpoint",
    "GatherState",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
    "Phase",
    "ProgressiveResize",
    "ReplicaCheck",
    "SchemeSchedule",
    "Throughput",
]
