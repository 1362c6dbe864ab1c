"""Trains around a server on rank 0, with what the first argument says; the second is a folder.

- "slow": a step of the last rank takes longer than the stall limit.
- "kill": the last rank is killed in the second epoch.
- "raise": the last rank raises an error there.
- "none": trains to the end, from what is in the folder.
"""

import os
import signal
import sys
import time

import keras
import numpy as np

import keras_callbacks
import tfposeidon as tp
from tests.on_ranks import models

STALL_LIMIT_S, LONG_STEP_S = 2, 5
EPOCHS = 4


class Trouble(keras.callbacks.Callback):
    """Lets the last rank be late, or end, as the script was told."""

    def __init__(self, kind):
        super().__init__()
        self._kind, self._epoch, self._waited = kind, 0, False

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if tp.rank() != tp.size() - 1:
            # Longer than it takes to notice that a rank is gone.
            time.sleep(0.1)
            return
        if self._kind == "slow" and not self._waited:
            self._waited = True
            time.sleep(LONG_STEP_S)
        if self._epoch < 2 or batch < 2:
            return
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._kind == "raise":
            raise ValueError("broken on purpose")


def main(kind, folder):
    tp.init(stall_timeout_s=STALL_LIMIT_S, links="unknown", server_rank=0)
    keras.utils.set_random_seed(tp.rank())
    model = models.mlp()
    # Twice the ranks' pace apart: the last one takes half as many steps meanwhile.
    optimizer = tp.ElasticAveraging(keras.optimizers.SGD(0.1), every=2, alpha=0.4)
    model.compile(optimizer, models.LOSS)
    data = models.mlp.data(64)
    model.fit(
        *data,
        batch_size=8,
        epochs=EPOCHS,
        validation_data=data,
        callbacks=[keras_callbacks.Checkpoint(folder), Trouble(kind)],
        verbose=0,
    )
    assert np.isfinite(model.get_weights()[0]).all()
    print(f"rank {tp.rank()} has {models.digest(model.get_weights())}", flush=True)
    print(f"{int(model.optimizer.iterations)} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
