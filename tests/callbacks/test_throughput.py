import pytest

import keras_callbacks
from tests.helpers import models
from tests.helpers.callbacks import compiled


@pytest.mark.parametrize(
    ("steps", "reported"),
    [
        (1, {"megabytes_sent"}),
        (2, {"megabytes_sent", "samples_per_second", "exposed_communication"}),
    ],
)
def test_an_epoch_with_a_single_step_reports_no_time(steps, reported):
    history = compiled().fit(
        *models.mlp.data(4 * steps),
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[keras_callbacks.Throughput()],
        validation_data=models.mlp.data(4),
    )
    assert {name: len(values) for name, values in history.history.items()} == dict.fromkeys(
        reported | {"loss", "val_loss"}, 2
    )


def test_an_epoch_without_steps_reports_nothing():
    callback, logs = keras_callbacks.Throughput(), {}
    callback.set_model(compiled())
    callback.on_epoch_begin(0)
    callback.on_epoch_end(0, logs)
    assert not logs
