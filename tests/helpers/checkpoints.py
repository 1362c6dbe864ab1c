"""Runs that are saved at each step, resumed, and compared."""

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
    """A run that always sees the same data in the same order, of a new model or of this one."""
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
"""Stops in two epochs of two batches: in the first epoch, between both, after the last batch."""
BETWEEN_AND_WITHIN = slice(1, None, 2)
"""Stops in two epochs of three batches: in the first epoch, between both, in the second epoch."""


def check_resumes(
    wire, build, make_optimizer, scheme="auto", callbacks=(), batches=2, stops=WITHIN_AND_BETWEEN
):
    """Restores at some steps, and compares what follows with a run that was not interrupted.

    The first is resumed by a new model, as in a new process. The others are by the same one, which
    need not be traced again, and from which a snapshot has to take all that it has learnt since.
    What accumulates over two batches needs three of them, so that an update spans two epochs.
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
