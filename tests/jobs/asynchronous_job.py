"""Trains with a server and workers, with the fault that the first argument names.

The second argument is a folder, and the third the rank of the server. The faults are:

- "slow": a step of the last rank takes longer than the stall limit.
- "kill": the last rank is killed in the third epoch.
- "raise": the last rank raises an error in the third epoch.
- "raise in a loop": the last rank raises an error in a custom loop.
- "raise at the server": the server raises an error at the start of its third epoch.
- "terminate": the server receives SIGTERM shortly after this start.
- "none": there is no fault; training resumes from the folder.
"""

import os
import signal
import sys
import threading
import time

import keras
import numpy as np

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models

STALL_LIMIT_S, LONG_STEP_S = 4, 10
"""The long step is that of the slow rank; no other step, not even the first, may take so long."""
EPOCHS = 4


class Trouble(keras.callbacks.Callback):
    """Delays or ends the last rank, or ends the server, as the script's argument requests."""

    def __init__(self, kind, server):
        super().__init__()
        self._server = server
        self._kind, self._epoch, self._waited = kind, 0, False

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        if epoch < 2 or tp.rank() != self._server:
            return
        if self._kind == "terminate":
            # The signal arrives while the server waits for workers.
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if self._kind == "raise at the server":
            raise ValueError("broken on purpose")

    def on_train_batch_begin(self, batch, logs=None):
        # A worker must still be training when the server ends.
        if tp.rank() != tp.size() - 1 or self._kind in ("terminate", "raise at the server"):
            # The pauses last longer than it takes to detect that a rank has ended.
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


class Resumed(keras.callbacks.Callback):
    """Prints the epoch and the number of steps at which the server starts."""

    acts_at_server = True
    _has_begun = False

    def on_epoch_begin(self, epoch, logs=None):
        if not self._has_begun:
            self._has_begun = True
            steps = int(self.model.optimizer.iterations)
            print(f"the server begins epoch {epoch} after {steps} steps", flush=True)


def _loop(model, optimizer, data, folder):
    """Trains in a custom loop, in which the last rank fails after some exchanges."""
    optimizer.build(model.trainable_variables)

    def train():
        for _ in range(4):
            model.train_on_batch(*data)
            time.sleep(0.1)
        if tp.rank() == tp.size() - 1:
            raise ValueError("broken on purpose")
        time.sleep(60)

    path = os.path.join(folder, "center.weights.h5")
    start = models.digest(model.get_weights())

    def save():
        model.save_weights(path)
        print(f"center moved: {models.digest(model.get_weights()) != start}", flush=True)

    optimizer.run(train, models=[model], on_failure=save)


def main(kind, folder, server):
    server = int(server)
    limit_s = STALL_LIMIT_S if kind == "slow" else 10 * STALL_LIMIT_S
    tp.init(stall_timeout_s=limit_s, network="unknown", server_rank=server)
    keras.utils.set_random_seed(tp.rank())
    model = models.mlp()
    optimizer = tp.ElasticAveraging(keras.optimizers.SGD(0.1), sync_every=2, alpha=0.4)
    model.compile(optimizer, models.LOSS)
    data = models.mlp.data(64)
    if kind == "raise in a loop":
        _loop(model, optimizer, data, folder)
    model.fit(
        *data,
        batch_size=8,
        epochs=EPOCHS,
        validation_data=data,
        callbacks=[keras_callbacks.Checkpoint(folder), Trouble(kind, server), Resumed()],
        verbose=0,
    )
    assert np.isfinite(model.get_weights()[0]).all()
    print(f"rank {tp.rank()} has {models.digest(model.get_weights())}", flush=True)
    if tp.rank() == server:
        print(f"the server ends after {int(model.optimizer.iterations)} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
