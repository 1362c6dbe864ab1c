"""Runs with `LocalUpdates` that go on from checkpoints of another number of ranks."""

import keras
import numpy as np

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.over_ranks import exchange_objects

# Files name the class, which has to be there when they are loaded.
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
    """Notes a model's state when training begins, and when it has ended."""

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "begin"):
            self.begin = state(self.model)

    def on_train_end(self, logs=None):
        self.end = state(self.model)


def state(model):
    """Returns the center, what the rule keeps, and this rank's slots and residuals, for JSON.

    Args:
      model: Model whose variables hold the center.
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
    """Trains on this rank's samples, from the last checkpoint on.

    Args:
      name: One of `OPTIMIZERS`.
      folder: Folder of checkpoints, in one for each name.
      epochs: Number of the last epoch.

    Returns:
      The state of each rank when training began, and when it had ended. Each has saved the model.
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
      folder: Folder of the `fit` that has saved it.
      rank: The rank.
    """
    return state(keras.saving.load_model(folder / f"{name}-{rank}.keras"))


def check_loaded(found, saved):
    """Checks that a model equals the saved one, except for residuals, which files do not hold.

    Args:
      found: State of the model.
      saved: State of the rank that has saved it.
    """
    for what in ("center", "slots", "kept"):
        assert found[what] == saved[what], what


def check_goes_on(begin, end):
    """Checks that ranks have begun where others had ended.

    Args:
      begin: State of each rank that there is.
      end: State of each rank that there was.
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
