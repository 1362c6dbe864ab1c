"""Provides runs with `LocalUpdates` that resume on another number of ranks."""

import keras
import numpy as np

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.over_ranks import exchange_objects

# Files name this class, so it must be imported before they are loaded.
from tfposeidon import LocalUpdates
from tfposeidon.communication import runtime

EVERY, SAMPLES = 4, 72
SPARSE = tp.schemes.TopK(density=0.1, min_elements=0)
OPTIMIZERS = {
    "average": lambda: LocalUpdates(keras.optimizers.Adam(0.01), EVERY),
    "outer, late": lambda: LocalUpdates(keras.optimizers.SGD(0.1), EVERY, "outer", overlap_steps=1),
    "sparse": lambda: LocalUpdates(keras.optimizers.SGD(0.1, 0.5), EVERY, scheme=SPARSE),
}


class Noting(keras.callbacks.Callback):
    """Records the state of a model at the start and the end of training."""

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "begin"):
            self.begin = state(self.model)

    def on_train_end(self, logs=None):
        self.end = state(self.model)


def state(model):
    """Returns the global weights, the outer optimizer's state, and this rank's state and residuals.

    Args:
      model: Model whose variables hold the global weights.
    """
    optimizer = model.optimizer
    named = [(part.name, v.numpy().tolist()) for v, part in optimizer.rank_state]
    return {
        "center": [w.tolist() for w in model.get_weights()],
        "kept": [v.numpy().tolist() for v in optimizer.variables],
        "slots": [array for name, array in named if name.startswith("inner")],
        "residual": [array for name, array in named if name == "residual"],
    }


def fit(name, folder, epochs):
    """Trains on this rank's samples, starting from the last checkpoint.

    Args:
      name: One of `OPTIMIZERS`.
      folder: Folder that has a folder of checkpoints for each name.
      epochs: Total number of epochs.

    Returns:
      The state of each rank at the start and the end of training. Each rank has saved its model.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model, noting = models.mlp(), Noting()
    model.compile(OPTIMIZERS[name](), models.LOSS)
    mine = slice(tp.rank(), None, tp.size())
    x, y = (part[mine] for part in models.mlp.data(SAMPLES))
    callbacks = [keras_callbacks.Checkpoint(folder / name), noting]
    options = {"batch_size": 6, "epochs": epochs, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=callbacks, **options)
    model.save(folder / f"{name}-{tp.rank()}.keras")
    return exchange_objects((noting.begin, noting.end), runtime.wire(), f"fit {name}")


def loaded(name, folder, rank=0):
    """Returns the state of a model that a rank has saved.

    Args:
      name: One of `OPTIMIZERS`.
      folder: Folder that `fit` received.
      rank: Rank that saved the model.
    """
    return state(keras.saving.load_model(folder / f"{name}-{rank}.keras"))


def check_loaded(found, saved):
    """Checks that a loaded model equals the saved one, except for residuals, which files omit.

    Args:
      found: State of the loaded model.
      saved: State of the rank that saved it.
    """
    for what in ("center", "slots", "kept"):
        assert found[what] == saved[what], what


def check_goes_on(begin, end):
    """Checks that ranks continue from the state with which other ranks ended.

    Args:
      begin: State of each rank at its start.
      end: State of each earlier rank at its end.
    """
    for rank in begin:
        assert (rank["center"], rank["kept"]) == (end[0]["center"], end[0]["kept"])
        _check_close(rank["slots"], _over_ranks(np.mean, end, "slots"))
    sums = [_over_ranks(np.sum, ranks, "residual") for ranks in (begin, end)]
    _check_close(*sums)


def _over_ranks(function, ranks, what):
    return [function(arrays, axis=0) for arrays in zip(*(r[what] for r in ranks), strict=True)]


def _check_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
