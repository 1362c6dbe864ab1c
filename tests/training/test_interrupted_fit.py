"""A `fit` that is interrupted, as in a notebook, does not affect the next `fit`."""

import keras
import numpy as np
import pytest

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models

STEPS = 4


class Interrupt(keras.callbacks.Callback):
    """Interrupts training like a user's Ctrl-C, before or after a batch."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.before, self.after = before, after

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.before:
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.after:
            raise KeyboardInterrupt


def _compiled():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = models.mlp()
    model.compile(optimizer=tp.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss=models.LOSS)
    return model


def _fit(model, folder, *callbacks):
    x, y = models.mlp.data(4 * STEPS)
    schedule = keras_callbacks.SchemeSchedule({0: "alltoall"})
    checkpoint = keras_callbacks.Checkpoint(folder, every_n_steps=1)
    model.fit(
        x,
        y,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[schedule, checkpoint, *callbacks],
    )
    return model.get_weights()


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_fit_after_an_interrupted_resume_equals_a_whole_run(tmp_path, before):
    """The interruption occurs while earlier batches are skipped, or afterwards."""
    with pytest.raises(KeyboardInterrupt):
        _fit(_compiled(), tmp_path / "a", Interrupt(after=2))
    model = _compiled()
    with pytest.raises(KeyboardInterrupt):
        _fit(model, tmp_path / "a", Interrupt(before=before))
    expected = _fit(_compiled(), tmp_path / "b")
    for one, other in zip(_fit(model, tmp_path / "a"), expected, strict=True):
        np.testing.assert_array_equal(one, other)
