"""Callbacks receive the calls of plain Keras: the same hooks, order, indices and names of logs."""

import functools

import keras
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import on_one_rank

HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


class Recorder(keras.callbacks.Callback):
    """Records all calls, with the names in their logs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if name not in HOOKS:
            return super().__getattribute__(name)

        def hook(*arguments, **named):
            *index, logs = (*arguments, *named.values())
            if logs is not None and not isinstance(logs, dict):
                index, logs = [logs], None
            self.calls.append((name, *index, sorted(logs or {})))

        return hook


def _calls(optimizer, data, validation, steps_per_execution, **fit):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = models.mlp()
    model.compile(
        optimizer, models.LOSS, metrics=["accuracy"], steps_per_execution=steps_per_execution
    )
    recorder = Recorder()
    model.fit(data, epochs=2, verbose=0, callbacks=[recorder], validation_data=validation, **fit)
    return _whole(recorder.calls), model


def _whole(calls):
    """Omits batches that begin but do not end: with these, Keras finds the end of unknown data."""
    following = [*calls[1:], ("",)]
    begin, end = "on_train_batch_begin", "on_train_batch_end"
    return [
        call
        for call, after in zip(calls, following, strict=True)
        if call[0] != begin or after[0] == end
    ]


def _data(batches, is_known):
    data = tf.data.Dataset.from_tensor_slices(models.mlp.data(4 * batches)).batch(4)
    return data if is_known else data.filter(lambda x, y: True)


BATCHES = 4


@functools.cache
def _usual_calls(is_known, steps_per_execution):
    """Returns the calls of plain Keras."""
    data, validation = _data(BATCHES, is_known), _data(2, is_known)
    sgd = keras.optimizers.SGD(0.1)
    return on_one_rank(lambda: _calls(sgd, data, validation, steps_per_execution)[0])


@pytest.mark.ranks("2")
@pytest.mark.parametrize(
    ("steps_per_execution", "is_known", "more"),
    [(1, False, 2), (1, True, 0), (2, False, 0), (2, True, 2), (3, False, 2), (3, True, 0)],
)
def test_callback_calls_equal_those_of_keras(wire, steps_per_execution, is_known, more):
    """An epoch has four batches: with three steps per execution, the second execution has one."""
    usual = _usual_calls(is_known, steps_per_execution)
    mine = _data(BATCHES + more * wire.topology.rank, is_known)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1))
    ours, model = _calls(optimizer, mine, _data(2, is_known), steps_per_execution)
    same_on_all_ranks(model.get_weights(), wire)
    assert int(optimizer.iterations) == 2 * BATCHES
    for number, (call, expected) in enumerate(zip(ours, usual, strict=False)):
        assert call == expected, (
            number,
            ours[number - 2 : number + 3],
            usual[number - 2 : number + 3],
        )
    assert len(ours) == len(usual), (ours[-3:], usual[-3:])
