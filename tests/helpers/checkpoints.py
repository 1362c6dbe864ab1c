"""Saves a run at each step, resumes it, and compares the results."""

import os
import shutil

import keras
import numpy as np

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import compiled, shared_folder
from tests.helpers.models import rank_variables
from tests.helpers.over_ranks import exchange_objects

EPOCHS = 2
BATCHES = 3


def checkpoint_job(
    build,
    folder,
    make_optimizer,
    callbacks=(),
    epochs=EPOCHS,
    every_n_steps=None,
    scheme="auto",
    batches=BATCHES,
    model=None,
    resume=True,
    **fit,
):
    """Trains a new model or the given one, with the same data in the same order each time."""
    if model is None:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = compiled(build, make_optimizer(), scheme, metrics=["accuracy"])
    x, y = models.mlp.data(4 * batches * 2)
    mine = slice(tp.rank(), None, 2)
    checkpoint = keras_callbacks.Checkpoint(folder, every_n_steps, keep=100, resume=resume)
    averages = [keras_callbacks.BroadcastVariables(), keras_callbacks.MetricAverage()]
    history = model.fit(
        x[mine],
        y[mine],
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*averages, *callbacks, checkpoint],
        **fit,
    )
    return model, history.history


def saved_state(model):
    own = rank_variables(tp.unwrap(model.optimizer))
    variables = [*model.variables, *model.optimizer.variables, *own]
    return [v.numpy() for v in variables]


EVERY_STEP = slice(None)
WITHIN_AND_BETWEEN = slice(None, None, 2)
"""Snapshots of two epochs of two batches: in the first epoch, after it, and at the end."""
BETWEEN_AND_WITHIN = slice(1, None, 2)
"""Snapshots of two epochs of three batches: in the first epoch, after it, in the second epoch."""


def check_resumes(
    wire, build, make_optimizer, scheme="auto", callbacks=(), batches=2, stops=WITHIN_AND_BETWEEN
):
    """Resumes a run from some of its snapshots, and compares each with the uninterrupted run.

    A new model resumes the first snapshot, as in a new process. The same model resumes the others,
    which avoids retracing, and checks that a snapshot replaces the whole state of the model.
    Accumulation over two batches requires `batches=3`, so that an update spans two epochs.
    """
    folder = shared_folder(wire)
    whole, history = checkpoint_job(
        build,
        os.path.join(folder, "whole"),
        make_optimizer,
        callbacks,
        every_n_steps=1,
        scheme=scheme,
        batches=batches,
    )
    names = sorted(os.listdir(os.path.join(folder, "whole")))
    assert len(names) == EPOCHS * batches + EPOCHS
    resumed = None
    for name in names[:-1][stops]:
        target = os.path.join(folder, f"from-{name}")
        if wire.topology.rank == 0:
            shutil.copytree(os.path.join(folder, "whole", name), os.path.join(target, name))
        exchange_objects(None, wire, "copied")
        options = {"scheme": scheme, "batches": batches, "model": resumed}
        resumed, rest = checkpoint_job(build, target, make_optimizer, callbacks, **options)
        for a, b in zip(saved_state(resumed), saved_state(whole), strict=True):
            np.testing.assert_array_equal(a, b, f"resumed from {name}")
        for metric, values in rest.items():
            np.testing.assert_allclose(
                values, history[metric][-len(values) :], rtol=1e-6, err_msg=f"{metric} {name}"
            )
    if wire.topology.rank == 0:
        shutil.rmtree(folder)
