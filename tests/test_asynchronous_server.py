"""Tests a server in one process: the end of its epochs, refused callbacks, and its failure."""

import os
import signal
import time

import keras
import pytest

import keras_callbacks
from tests.helpers.checks import LogLines
from tfposeidon.elastic_averaging import fit
from tfposeidon.elastic_averaging.calls import Call
from tfposeidon.elastic_averaging.job import saved_at_failure
from tfposeidon.elastic_averaging.server import Server


class _Told:
    """Server of three workers, whose calls it receives from the test instead of its threads."""

    def __init__(self):
        self._server = Server(dict.fromkeys((1, 2, 3)), [], stall_limit_s=0)
        self._epochs = self._server.epochs()

    def calls(self, rank, *calls):
        for call in calls:
            self._server._answer(rank, call, 0)

    def next_epoch(self):
        return next(self._epochs, None)


def test_an_epoch_ends_with_the_mean_of_the_workers():
    told = _Told()
    told.calls(1, *3 * [Call.EPOCH])
    assert told.next_epoch() == 0
    told.calls(2, *2 * [Call.EPOCH])
    told.calls(3, Call.EPOCH)
    assert told.next_epoch() == 1


def test_the_newest_of_several_epochs_is_used():
    told = _Told()
    for rank in (1, 2, 3):
        told.calls(rank, *4 * [Call.EPOCH])
    assert told.next_epoch() == 3
    for rank in (1, 2, 3):
        told.calls(rank, Call.EPOCH, Call.ENDED)
    assert [told.next_epoch(), told.next_epoch()] == [4, None]


def test_epochs_without_batches_are_ignored():
    told = _Told()
    told.calls(1, *9 * [Call.EMPTY_EPOCH], Call.ENDED)
    told.calls(2, *2 * [Call.EPOCH])
    told.calls(3, *2 * [Call.EPOCH])
    assert told.next_epoch() == 1


def test_the_last_epoch_ends_if_all_workers_have_no_batches():
    told = _Told()
    for rank in (1, 2, 3):
        told.calls(rank, Call.EMPTY_EPOCH, Call.EMPTY_EPOCH, Call.ENDED)
    assert [told.next_epoch(), told.next_epoch()] == [1, None]


def test_the_last_epoch_ends_if_a_worker_has_stopped():
    told = _Told()
    told.calls(1, Call.EPOCH, Call.ENDED)
    for rank in (2, 3):
        told.calls(rank, *5 * [Call.EPOCH], Call.ENDED)
    assert [told.next_epoch(), told.next_epoch()] == [4, None]


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (keras.callbacks.ModelCheckpoint("x.keras", save_freq=5), 'save_freq="epoch"'),
        (keras.callbacks.BackupAndRestore("x", save_freq=5), 'save_freq="epoch"'),
        (keras.callbacks.TensorBoard(update_freq="batch"), 'update_freq="epoch"'),
        (keras_callbacks.Checkpoint("x", every_n_steps=5), "every_n_steps=None"),
        (keras.callbacks.ReduceLROnPlateau(), "LearningRateSchedule"),
        (keras.callbacks.TerminateOnNaN(), "raise_error=True"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_without_an_effect_are_refused(callback, remedy):
    with pytest.raises(ValueError, match=f"Received: {type(callback).__name__}.*{remedy}"):
        fit.check_callback(callback)


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.ModelCheckpoint("x.keras"),
        keras.callbacks.BackupAndRestore("x"),
        keras.callbacks.TensorBoard(),
        keras.callbacks.TerminateOnNaN(raise_error=True),
        keras_callbacks.Checkpoint("x"),
        # This callback runs on workers, and counts their steps.
        keras_callbacks.ReplicaCheck(every_n_steps=5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_with_an_effect_are_accepted(callback):
    fit.check_callback(callback)


def _idle_server():
    return Server({}, [], stall_limit_s=0)


def _fails():
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("show", "savers", "said", "saves"),
    [
        (lambda: None, 2, "the server has saved the global weights", 2),
        (lambda: None, 1, "the server has saved the global weights", 1),
        (_fails, 1, "the global weights could not be saved", 0),
        (lambda: None, 0, "it is lost", 0),
    ],
)
def test_all_savers_run_before_the_cause_is_raised(show, savers, said, saves):
    done = []
    # Savers that fail precede and follow the others.
    functions = [_fails, *savers * [lambda: done.append(1)], _fails] if savers else []
    with (
        LogLines() as lines,
        pytest.raises(ValueError, match="the cause"),
        saved_at_failure(_idle_server(), show, functions, "it is lost"),
    ):
        raise ValueError("the cause")
    assert said in lines[-1]
    assert len(done) == saves


def _terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_sigterm_saves_the_global_weights_and_ends_the_server():
    done, before = [], signal.getsignal(signal.SIGTERM)
    saved = saved_at_failure(_idle_server(), int, [lambda: done.append(1)], "")
    with pytest.raises(SystemExit) as exit_, saved:
        _terminate()
    assert (exit_.value.code, done) == (128 + signal.SIGTERM, [1])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_normal_end_saves_nothing():
    with saved_at_failure(_idle_server(), _fails, [_fails], ""):
        pass
