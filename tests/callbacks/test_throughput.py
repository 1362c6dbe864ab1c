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
def test_an_epoch_of_one_step_has_no_time_to_report(steps, reported):
    history = (
        compiled()
        .fit(
            *models.mlp.data(4 * steps),
            batch_size=4,
            epochs=2,
            verbose=0,
            callbacks=[keras_callbacks.Throughput()],
            validation_data=models.mlp.data(4),
        )
        .history
    )
    assert {name: len(values) for name, values in history.items()} == dict.fromkeys(
        reported | {"loss", "val_loss"}, 2
    )
