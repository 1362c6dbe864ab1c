"""Tests phases of growing images: their settings, the number of traces, and their memory."""

import ctypes
import gc
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tensorflow.python.framework.func_graph import FuncGraph

import keras_callbacks
from keras_callbacks import Phase, ProgressiveResize
from tests.phased import TRACED, compiled, data_of, train
from tfposeidon.training.session import Session


def test_each_phase_has_its_rate_momentum_and_decay():
    model, seen = compiled(), []
    phases = [
        Phase(epochs=2, size=6, batch=4, momentum=0.8, weight_decay=0.1),
        Phase(epochs=1, size=8, batch=4, momentum=0.5),
        Phase(epochs=2, size=9, batch=2, weight_decay=0.3),
        Phase(epochs=1, size=9, batch=2, learning_rate=0.7),
    ]
    resize = ProgressiveResize(phases, learning_rate=lambda epoch: 0.1 * (1 + epoch))
    inner = model.optimizer.inner_optimizer
    rates = train(model, resize, after=lambda p: seen.append((inner.momentum, inner.weight_decay)))
    assert seen == [(0.8, 0.1), (0.5, 0.1), (0.5, 0.3), (0.5, 0.3)]
    # The last of three batches starts at two thirds of its epoch.
    last = np.arange(5) + 2 / 3
    expected = 0.1 * (1 + last) * np.array([1, 1, 1, 0.5, 0.5])
    np.testing.assert_allclose(rates, [*expected, 0.7], rtol=1e-5)


@pytest.mark.parametrize(("scheme", "traces"), [(None, 1), ("torus2d", 2)])
def test_a_phase_is_traced_once_or_twice_if_its_scheme_is_new(scheme, traces):
    model, counts = compiled(), []
    first = "hitopk" if scheme else None
    phases = [
        Phase(epochs=2, size=6, batch=4, scheme=first),
        Phase(epochs=2, size=8, batch=4, scheme=scheme),
    ]
    with mock.patch.object(Session, "forget_steps") as forgotten:
        train(model, ProgressiveResize(phases, 0.1), after=lambda phase: counts.append(len(TRACED)))
    assert counts[1] - counts[0] <= traces
    # The duration of a step depends on the image size, so `auto` plans again in each phase.
    assert forgotten.call_count == len(phases)


LEAK_BYTES = 10 * 2**20
"""Tolerance for memory that varies between phases; eight retained phases would need 55 MiB."""


@pytest.mark.slow
def test_ten_phases_use_no_more_memory_than_two():
    """This holds for graphs and bytes, also if schemes change."""
    model, graphs, resident = compiled(), [], []
    schemes = ["hitopk", "torus2d", "torus2d"]
    phases = [
        Phase(epochs=1, size=6 + 40 * (n % 2), batch=4, scheme=schemes[n % 3]) for n in range(10)
    ]

    def count(phase):
        gc.collect()
        graphs.append(sum(issubclass(type(one), FuncGraph) for one in gc.get_objects()))
        # The C library may retain memory that Python and TensorFlow have freed.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))

    train(model, ProgressiveResize(phases, 0.1), after=count)
    print(graphs, resident)
    assert graphs[9] <= graphs[1]
    assert resident[9] - resident[1] < LEAK_BYTES


@pytest.mark.slow
def test_killed_runs_resume_in_each_phase(tmp_path):
    """The kill occurs within a phase, between two epochs of a phase, or at its end.

    test_runs_resume_in_every_phase tests the same on several ranks.
    """
    phases = [
        Phase(epochs=2, size=6, batch=4, scheme="hitopk", momentum=0.9),
        Phase(epochs=1, size=8, batch=2, scheme="torus2d"),
        Phase(epochs=1, size=9, batch=2, momentum=0.5),
    ]

    def run(folder, steps=None):
        model = compiled()
        resize = ProgressiveResize(phases, learning_rate=lambda epoch: 0.1 / (1 + epoch))
        checkpoint = keras_callbacks.Checkpoint(folder, every_n_steps=1)
        if steps is not None:
            checkpoint = _Killed(folder, steps)
        train(model, resize, checkpoint)
        return model.get_weights()

    whole = run(tmp_path / "whole")
    # The phases end after steps 6, 9 and 12.
    for stop in (3, 6, 8, 11):
        folder = tmp_path / f"{stop}"
        with pytest.raises(KeyboardInterrupt):
            run(folder, stop)
        for one, other in zip(run(folder), whole, strict=True):
            np.testing.assert_array_equal(one, other)


class _Killed(keras_callbacks.Checkpoint):
    """Checkpoint that interrupts training after a number of steps."""

    def __init__(self, folder, steps):
        super().__init__(folder, every_n_steps=1)
        self._left = steps

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self._left -= 1
        if not self._left:
            self._files.finish()
            raise KeyboardInterrupt


def test_a_complete_run_is_restored(tmp_path):
    phases = [Phase(epochs=1, size=6, batch=4), Phase(epochs=1, size=8, batch=4)]
    first, second = compiled(), compiled()
    train(first, ProgressiveResize(phases, 0.1), keras_callbacks.Checkpoint(tmp_path))
    resize, checkpoint = ProgressiveResize(phases, 0.1), keras_callbacks.Checkpoint(tmp_path)
    assert [phase.size for phase in resize.remaining(checkpoint.epoch_to_resume())] == [8]
    assert train(second, resize, checkpoint) == []
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


PHASE = Phase(epochs=1, size=6, batch=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Phase(epochs=0, size=6, batch=4), "`epochs` must be an integer >= 1"),
        (lambda: Phase(epochs=1, size=0, batch=4), "`size` must be an integer >= 1"),
        (lambda: Phase(epochs=1, size=6, batch=4, momentum=1.0), r"`momentum` must be .*\[0, 1\)"),
        (lambda: Phase(epochs=1, size=6, batch=4, scheme="gossip"), "`scheme` must be one of"),
        (lambda: ProgressiveResize([], 0.1), r"at least one phase. Received: phases=\[\]"),
        (lambda: ProgressiveResize([PHASE]), "have a learning rate. Received: learning_rate=None"),
        (lambda: ProgressiveResize([PHASE], -1.0), "`learning_rate` must be"),
        (
            lambda: ProgressiveResize(
                [PHASE, Phase(epochs=1, size=8, batch=4, scheme="alltoall")], 0.1
            ),
            "first phase must set it, too. Received: scheme='alltoall' from epoch 1 on",
        ),
    ],
)
def test_invalid_phases_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_that_the_optimizer_lacks_are_refused():
    phase = Phase(epochs=1, size=6, batch=4, momentum=0.5)
    with pytest.raises(ValueError, match=r"Received: momentum=0.5 for SGD with momentum=0.0"):
        train(compiled(momentum=0.0), ProgressiveResize([phase], 0.1))


def test_a_fit_over_several_phases_is_refused(tmp_path):
    """This holds even if an earlier phase stopped early, because its images have another size."""
    phases = [Phase(epochs=2, size=6, batch=4), Phase(epochs=1, size=8, batch=4)]
    message = r"Received: epochs 1 to 2, but the phase of 6 pixels ends with epoch 1"
    resize, checkpoint = ProgressiveResize(phases, 0.1), keras_callbacks.Checkpoint(tmp_path)
    model, fit = compiled(), {"shuffle": False, "verbose": 0, "callbacks": [resize, checkpoint]}
    model.fit(data_of(phases[0]), epochs=1, **fit)
    with pytest.raises(ValueError, match=message):
        model.fit(data_of(resize.phases[1]), initial_epoch=2, epochs=3, **fit)


def test_the_callback_must_precede_checkpoint(tmp_path):
    resize, checkpoint = ProgressiveResize([PHASE], 0.1), keras_callbacks.Checkpoint(tmp_path)
    train(compiled(), resize, checkpoint)
    with pytest.raises(ValueError, match="must come before Checkpoint"):
        compiled().fit(data_of(PHASE), shuffle=False, callbacks=[checkpoint, resize])


def test_epochs_beyond_the_last_phase_are_refused():
    with pytest.raises(ValueError, match=r"0 to 0. Received: epoch 1"):
        ProgressiveResize([PHASE], 0.1).phase_at(1)
    with pytest.raises(ValueError, match=r"must belong to one phase"):
        compiled().fit(
            data_of(PHASE), epochs=2, callbacks=[ProgressiveResize([PHASE], 0.1)], shuffle=False
        )
