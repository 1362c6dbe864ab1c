"""`fit` logs the metrics that one process would compute on the samples of all ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import metrics

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.over_ranks import exchange_objects

pytestmark = pytest.mark.ranks("2", core=True)

BINARY = [
    metrics.AUC(num_thresholds=20),
    metrics.AUC(num_thresholds=20, curve="PR", name="pr"),
    metrics.FalseNegatives(),
    metrics.FalsePositives(),
    metrics.TrueNegatives(),
    metrics.TruePositives(),
    metrics.Precision(),
    metrics.Recall(),
    metrics.PrecisionAtRecall(0.5, num_thresholds=20),
    metrics.RecallAtPrecision(0.5, num_thresholds=20),
    metrics.SensitivityAtSpecificity(0.5, num_thresholds=20),
    metrics.SpecificityAtSensitivity(0.5, num_thresholds=20),
    metrics.BinaryAccuracy(),
    metrics.BinaryCrossentropy(),
    metrics.BinaryIoU(),
    metrics.Hinge(),
    metrics.SquaredHinge(),
    metrics.Accuracy(),
]
CLASSES = [
    metrics.CategoricalAccuracy(),
    metrics.TopKCategoricalAccuracy(2),
    metrics.CategoricalCrossentropy(),
    metrics.CategoricalHinge(),
    metrics.KLDivergence(),
    metrics.F1Score(average="macro"),
    metrics.F1Score(average=None, name="f1_of_classes"),
    metrics.FBetaScore(average="micro", beta=2.0),
    metrics.OneHotIoU(3, [0, 2]),
    metrics.OneHotMeanIoU(3),
]
SPARSE = [
    metrics.SparseCategoricalAccuracy(),
    metrics.SparseTopKCategoricalAccuracy(2),
    metrics.SparseCategoricalCrossentropy(),
    metrics.IoU(3, [1], sparse_y_pred=False),
    metrics.MeanIoU(3, sparse_y_pred=False),
]
NUMBERS = [
    metrics.MeanSquaredError(),
    metrics.RootMeanSquaredError(),
    metrics.MeanAbsoluteError(),
    metrics.MeanAbsolutePercentageError(),
    metrics.MeanSquaredLogarithmicError(),
    metrics.CosineSimilarity(),
    metrics.LogCoshError(),
    metrics.R2Score(),
    metrics.ConcordanceCorrelation(),
    metrics.PearsonCorrelation(),
    metrics.Poisson(),
]


def _outputs():
    inputs = keras.Input((6,))
    dense = keras.layers.Dense
    return keras.Model(
        inputs,
        {
            "binary": dense(1, "sigmoid", name="binary")(inputs),
            "classes": dense(3, "softmax", name="classes")(inputs),
            "sparse": dense(3, "softmax", name="sparse")(inputs),
            "number": dense(2, "softplus", name="number")(inputs),
        },
    )


def _samples(count):
    draw = np.random.RandomState(3)
    labels = draw.randint(0, 3, count)
    targets = {
        "binary": draw.randint(0, 2, (count, 1)).astype("float32"),
        "classes": np.eye(3, dtype="float32")[labels],
        "sparse": labels,
        "number": draw.rand(count, 2).astype("float32") + 0.5,
    }
    return draw.randn(count, 6).astype("float32"), targets


def _rows(samples, rows):
    return keras.tree.map_structure(lambda array: array[rows], samples)


def test_every_metric_of_keras_equals_one_process(wire):
    """Numbers of validation samples differ, samples have weights, and the loss is regularized."""
    model = _outputs()
    model.layers[1].kernel_regularizer = keras.regularizers.L2(0.1)
    model.compile(
        tp.DistributedOptimizer(keras.optimizers.SGD(0.0)),
        {
            "binary": "binary_crossentropy",
            "classes": "categorical_crossentropy",
            "sparse": "sparse_categorical_crossentropy",
            "number": "mse",
        },
        metrics={"binary": BINARY, "classes": CLASSES, "sparse": SPARSE, "number": NUMBERS},
        weighted_metrics={"binary": [metrics.AUC(num_thresholds=20, name="weighted_auc")]},
    )
    tested = {type(one) for one in (*BINARY, *CLASSES, *SPARSE, *NUMBERS)}
    classes = {getattr(metrics, name) for name in dir(metrics) if name[0].isupper()}
    abstract = {metrics.Metric, metrics.Mean, metrics.Sum, metrics.MeanMetricWrapper}
    assert classes - abstract == tested
    x, y = _samples(36)
    weight = np.random.RandomState(4).rand(36).astype("float32")
    weights = {name: weight if name == "binary" else np.ones(36, "float32") for name in y}
    training = [slice(0, 8), slice(8, 16)]
    validation = [slice(16, 28), slice(28, 36)]
    mine, held = training[wire.topology.rank], validation[wire.topology.rank]
    history = model.fit(
        *_rows((x, y), mine),
        sample_weight=_rows(weights, mine),
        validation_data=_rows((x, y, weights), held),
        batch_size=4,
        verbose=0,
    ).history
    for prefix, rows in (("", slice(0, 16)), ("val_", slice(16, 36))):
        inputs, targets = _rows((x, y), rows)
        expected = model.evaluate(
            inputs,
            targets,
            sample_weight=_rows(weights, rows),
            batch_size=4,
            verbose=0,
            return_dict=True,
        )
        assert {name for name in history if name.startswith("val_") == bool(prefix)} == {
            prefix + name for name in expected
        }
        for name, value in expected.items():
            np.testing.assert_allclose(
                history[prefix + name][0], value, rtol=1e-4, atol=1e-6, err_msg=prefix + name
            )
    everybody = exchange_objects(str(history), wire, "history")
    assert everybody[0] == everybody[1]


class _Kept(metrics.Metric):
    """Metric of the largest target of the last batch, on the first rank and on average."""

    def __init__(self):
        super().__init__(name="kept")
        self.first = self.add_variable((), "zeros", aggregation="only_first_replica", name="first")
        self.mean = self.add_variable((), "zeros", aggregation="mean", name="mean")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.first.assign(tf.reduce_max(tf.cast(y_true, "float32")))
        self.mean.assign(tf.reduce_max(tf.cast(y_true, "float32")))

    def result(self):
        return {"first": self.first.value, "mean": self.mean.value}


class _Traced(metrics.Metric):
    """Metric of the mean target, computed by functions that TensorFlow traces once."""

    def __init__(self):
        super().__init__(name="traced")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    @tf.function
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, "float32")))
        self.count.assign_add(tf.cast(tf.size(y_true), "float32"))

    @tf.function
    def result(self):
        return self.total / self.count


class _Bare(keras.Model):
    """Model that logs a value that is not the result of a metric."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "largest": tf.reduce_max(data[1])}


def test_other_values_are_averaged_by_samples(wire):
    inputs = keras.Input((1,))
    model = _Bare(inputs, keras.layers.Dense(1)(inputs))
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=[_Kept(), _Traced()])
    rows = (3, 1)[wire.topology.rank]
    y = np.full((rows, 1), (4.0, 8.0)[wire.topology.rank], "float32")
    history = model.fit(np.ones((rows, 1)), y, batch_size=3, verbose=0, epochs=2).history
    assert history["traced"] == [5.0, 5.0]
    history = {name: values[-1:] for name, values in history.items()}
    assert history["largest"] == [5.0]
    assert history["first"] == [4.0]
    assert history["mean"] == [6.0]


def test_ranks_without_validation_data_receive_the_metrics_of_others(wire):
    model = models.normalized()
    model.compile(
        tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.LOSS, metrics=["accuracy"]
    )
    x, y = models.normalized.data(8)
    seen = []
    watching = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(dict(logs)))
    model.fit(
        x,
        y,
        batch_size=4,
        verbose=0,
        validation_data=(x, y) if wire.topology.rank else None,
        callbacks=[watching, keras.callbacks.EarlyStopping("val_loss")],
    )
    logs = exchange_objects(seen, wire, "logs")
    assert "val_accuracy" in logs[0][0]
    assert logs[0] == logs[1]


def test_the_state_of_metrics_is_restored_after_an_epoch(wire):
    """Logs of batches differ between ranks. After `fit`, one rank alone evaluates and predicts."""
    model, seen = models.mlp(), {"batch": [], "epoch": []}
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.0)), models.LOSS)

    def see(hook):
        def append(_, logs):
            state = [v.numpy().tolist() for v in model.metrics_variables]
            seen[hook].append([float(logs["loss"]), state])

        return append

    watching = keras.callbacks.LambdaCallback(
        on_train_batch_end=see("batch"), on_epoch_end=see("epoch")
    )
    x, y = _rows(models.mlp.data(16), slice(wire.topology.rank, None, 2))
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[watching])
    if wire.topology.rank == 1:
        model.evaluate(x, y, verbose=0)
        assert model.predict(x, verbose=0).shape == (8, models.CLASSES)
    first, second = exchange_objects(seen, wire, "seen")
    for own in (first, second):
        assert [state for _, state in own["batch"][1::2]] == [state for _, state in own["epoch"]]
    assert [loss for loss, _ in first["epoch"]] == [loss for loss, _ in second["epoch"]]
    for (one, _), (other, _) in zip(first["batch"], second["batch"], strict=True):
        assert one != other


@pytest.mark.parametrize("make", [tp.LocalUpdates, tp.ShardedOptimizer])
def test_metrics_are_exact_with_other_optimizers(wire, make):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
    auc = metrics.AUC(num_thresholds=20)
    model.compile(make(keras.optimizers.SGD(0.0)), "binary_crossentropy", metrics=[auc])
    x, y = _samples(24)
    data, rank = (x, y["binary"]), wire.topology.rank
    history = model.fit(
        *_rows(data, slice(rank, 16, 2)),
        validation_data=_rows(data, (slice(0, 18), slice(18, 24))[rank]),
        batch_size=4,
        verbose=0,
    ).history
    for prefix, rows in (("", slice(0, 16)), ("val_", slice(0, 24))):
        expected = model.evaluate(*_rows(data, rows), verbose=0, return_dict=True)
        for name, value in expected.items():
            np.testing.assert_allclose(history[prefix + name], [value], rtol=1e-4, err_msg=name)


def test_callbacks_do_not_change_the_metrics(wire):
    """`MetricAverage` and `AverageBatchNorm` do not change the averages of `fit`."""

    def run(*callbacks):
        keras.utils.set_random_seed(1)
        model = models.normalized()
        model.compile(
            tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.LOSS, metrics=["accuracy"]
        )
        x, y = models.normalized.data(8)
        mine = slice(wire.topology.rank, None, 2)
        history = model.fit(
            x[mine], y[mine], validation_data=(x[mine], y[mine]), verbose=0, callbacks=[*callbacks]
        )
        return history.history, model.get_weights()

    plain, weights = run()
    averaged, others = run(
        keras_callbacks.BroadcastVariables(),
        keras_callbacks.AverageBatchNorm(),
        keras_callbacks.MetricAverage(),
    )
    assert plain == averaged
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)


class _Extra(keras.Model):
    """Model whose test step logs a value of its graph, which Keras does not replace."""

    def test_step(self, data):
        return {**super().test_step(data), "one": tf.constant(1.0)}


def test_metrics_are_exact_although_xla_rounds(wire):
    inputs = keras.Input((6,))
    model = _Extra(inputs, keras.layers.Dense(2)(inputs))
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=[metrics.R2Score()], jit_compile=True)
    x, y = _samples(24)
    data, seen = (x, y["number"]), []
    mine = _rows(data, slice(wire.topology.rank, None, 2))
    end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.append(dict(logs)))
    model.fit(*mine, validation_data=mine, batch_size=4, verbose=0, callbacks=[end])
    expected = model.evaluate(*data, verbose=0, return_dict=True)
    for name in ("r2_score", "loss"):
        np.testing.assert_allclose(seen[0][f"val_{name}"], expected[name], rtol=1e-4)


def test_metrics_are_exact_without_a_count_of_samples(wire):
    class Own(keras.Model):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.total = metrics.Sum(name="loss")

        @property
        def metrics(self):
            return [self.total]

        def train_step(self, data):
            super().train_step(data)
            self.total.update_state(tf.ones([2]))
            return {"loss": self.total.result()}

    inputs = keras.Input((6,))
    model = Own(inputs, keras.layers.Dense(2)(inputs))
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = _samples(8)
    assert model.fit(x, y["number"], batch_size=4, verbose=0).history["loss"] == [8.0]
