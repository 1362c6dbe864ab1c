"""Keras callbacks for training on many ranks: one per file.

In a list of callbacks the order matters: first what starts (`BroadcastVariables`), then what averages
(`AverageBatchNorm`, `MetricAverage`), then Keras's own that decide by metrics (`EarlyStopping`,
`ReduceLROnPlateau`), then `GatherState` and what saves, `Checkpoint` last.
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
    "ReplicaCheck",
    "SchemeSchedule",
    "Throughput",
]
