"""Trains until rank 1 fails at its third step, or with "none" until the job is ended.

With "measuring", rank 1 stops before the first step, while the network is measured. With "late" as
the first argument, ranks train with `LocalUpdates`, and rank 1 fails while an exchange overlaps the
steps of the others.
"""

import os
import signal
import sys
import time

import keras

import tfposeidon as tp
from tests.helpers import models
from tfposeidon.autotune import measurement

TROUBLES = {
    "raise": lambda: (_ for _ in ()).throw(ValueError("broken on purpose")),
    "reset": lambda: (_ for _ in ()).throw(ConnectionResetError(104, "Connection reset by peer")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "late": lambda: time.sleep(3600),
    "leave": lambda: sys.exit(0),
    "none": lambda: None,
    "measuring": lambda: None,
}
OPTIMIZERS = {
    "": lambda inner: tp.DistributedOptimizer(inner),
    "late": lambda inner: tp.LocalUpdates(inner, sync_every=3, overlap_steps=2),
}
PAUSE_S, LONG_PAUSE_S = 0.1, 1.0
"""Pause between steps, and a longer one for jobs that wait for a fault of the lab."""


class Trouble(keras.callbacks.Callback):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def on_train_batch_begin(self, batch, logs=None):
        if tp.rank() == 1 and batch == 2:
            announce("training has begun")
            TROUBLES[self.kind]()
        time.sleep(LONG_PAUSE_S if self.kind == "none" else PAUSE_S)


def announce(what):
    print(f"PID {os.getpid()}: {what}", flush=True)


def stop_while_links_are_measured():
    """Stops rank 1 after its first timed round, while the other ranks continue."""
    enlarge = measurement._Round.enlarge

    def stopping(self, times):
        has_enlarged = enlarge(self, times)
        if tp.rank() == 1:
            announce("links are measured")
            os.kill(os.getpid(), signal.SIGSTOP)
        return has_enlarged

    measurement._Round.enlarge = stopping


def main(trouble):
    how, _, kind = trouble.rpartition(" ")
    is_measuring = kind == "measuring"
    tp.init(
        stall_timeout_s=20,
        transport_timeout_s=10,
        network="measure" if is_measuring else "unknown",
    )
    announce("a rank")
    if is_measuring:
        stop_while_links_are_measured()
    keras.utils.set_random_seed(0)
    model = models.mlp()
    model.compile(OPTIMIZERS[how](keras.optimizers.SGD(0.1)), models.LOSS)
    epochs = 10_000 if kind == "none" else 1
    model.fit(
        *models.mlp.data(40), batch_size=4, epochs=epochs, verbose=0, callbacks=[Trouble(kind)]
    )
    print("the job went on", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
