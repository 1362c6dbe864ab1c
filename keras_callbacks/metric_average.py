"""Averages metrics over ranks, so that callbacks make the same decisions on all ranks."""

from keras_callbacks.rank_callback import RankCallback
from tfposeidon.training.global_metrics import GlobalMetrics


class MetricAverage(GlobalMetrics, RankCallback):
    """Replaces the metrics in the logs of an epoch by metrics over the samples of all ranks.

    `fit` replaces metrics automatically for optimizers of `tfposeidon`, before it calls other
    callbacks. Use this callback for other optimizers, with `synchronize_model=False`, or after a
    callback that adds values of its own rank to the logs.

    Each rank computes metrics on its own data. At the end of the epoch, all ranks aggregate the
    variables of each metric as the metric declares (`aggregation`, by default the sum), and compute
    its result from the aggregated variables, which is exact for any metric of Keras. Other values
    in the logs are replaced by their mean over ranks, weighted by the samples of each rank:
    validation samples for names that begin with `"val_"`, training samples for others. Ranks
    without a metric, for example when only some ranks validate, receive the metric of the other
    ranks. Vector metrics, such as `F1Score(average=None)`, are averaged elementwise; text and
    `None` are unchanged. On one rank, the callback has no effect.

    Put this callback before callbacks that depend on metrics (`EarlyStopping`, `ReduceLROnPlateau`,
    `ModelCheckpoint`), which then act identically on every rank.

    Raises:
      RuntimeError: At the end of an epoch, on all ranks, if the shapes of a metric differ.

    Cost: an all-reduce of the variables of metrics, 8 bytes per element, and two exchanges of about
    50 bytes per metric, once per epoch.

    >>> import keras, keras_callbacks
    >>> callbacks = [
    ...     keras_callbacks.MetricAverage(),
    ...     keras.callbacks.EarlyStopping("val_loss", patience=3),
    ... ]
    """
