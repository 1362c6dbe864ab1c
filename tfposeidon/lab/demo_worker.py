"""Script of each rank of `python -m tfposeidon demo`: trains with one scheme after another."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import tfposeidon
from tfposeidon.autotune import choose_plan
from tfposeidon.autotune.forecast import forecasts_of
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.plan import Plan
from tfposeidon.lab.accelerator import emulated_model
from tfposeidon.lab.demo import MODEL
from tfposeidon.lab.network import payload_bytes

STEPS_OF_AUTO = choose_plan.UNTIMED_STEPS + choose_plan.TIMED_STEPS
"""Steps of an epoch after which `auto` decides from their measured times."""


def main(arguments: list[str]) -> None:
    """Measures every scheme; rank 0 writes the results of all ranks to a JSON file."""
    path, steps, *schemes = arguments
    # Layers that wait for their accelerator must not block the threads that communicate.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    rank = tfposeidon.init().rank
    model = emulated_model(MODEL, seed=rank)
    found = {scheme: measure(model, scheme, int(steps)) for scheme in schemes}
    if rank == 0:
        Path(path).write_text(json.dumps(found))


def measure(model: keras.Model, scheme: str, steps: int) -> dict[str, float]:
    """Trains a few steps with a scheme; collective, with equal results on all ranks.

    "step_s" is the slowest rank's time, median over the steps. "sent_bytes" is the average number
    of bytes per rank and step that are sent to other nodes.
    """
    optimizer = tfposeidon.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme=scheme)
    # The plan reports the measured step time next to the predicted one, even after `auto` has
    # decided.
    optimizer.exchange.is_timed = True
    model.compile(optimizer=optimizer, loss="mse")
    batch = model.inputs[0].shape[0]
    # One step that is traced, or that traces again, and the timed steps.
    per_epoch = max(1 + steps, STEPS_OF_AUTO if scheme == "auto" else 0)
    data = np.ones((batch * per_epoch, 1), "float32")
    watch = Watch()
    # Pretend a long training, of which only two epochs run: `auto` retraces a step only if that
    # pays off in the remaining epochs.
    model.fit(data, data, batch_size=batch, epochs=1000, verbose=0, callbacks=[watch])
    own_steps_s, own_bytes = np.diff(watch.seen, axis=0)[-steps:].T
    wire = runtime.wire()
    steps_s = exchange_objects(own_steps_s.tolist(), wire, "demo.steps")
    # Each rank counts the bytes of its whole node.
    node_bytes = float(np.mean(own_bytes)) / wire.topology.node.size
    sent_bytes = exchange_objects(node_bytes, wire, "demo.bytes")
    # All ranks wait for the slowest. The median ignores steps that the machine disturbed.
    step_s = float(np.median(np.max(steps_s, axis=0)))
    if wire.topology.rank == 0:
        print(f"{scheme}: {1e3 * step_s:.0f} ms per step", flush=True)
        show_choice(optimizer.plan)
    return {"step_s": step_s, "sent_bytes": float(np.mean(sent_bytes))}


class Watch(keras.callbacks.Callback):
    """Callback that records time and node traffic at the end of each step; stops after two epochs.

    `seen` holds pairs of seconds and bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, int]] = []

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == 1

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((time.perf_counter(), payload_bytes()))


def show_choice(plan: Plan) -> None:
    """Prints the schemes and predictions of a plan that was chosen by predicted step times."""
    for forecast in forecasts_of(plan):
        if forecast.others:
            print(f"  chosen plan: {forecast.chosen}")
            print("\n".join(f"  {line}" for line in forecast.lines()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
