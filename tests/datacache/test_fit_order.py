"""`fit` trains in the order of the cache, however it divides epochs and data."""

import itertools
import math
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import datacache
import keras_callbacks
from datacache.epochs import EpochIterator

SAMPLES, BATCH = 24, 4
STEPS = SAMPLES // BATCH
ORDER = datacache.Order(samples=SAMPLES, global_batch=BATCH)


@pytest.fixture
def numbers(opened):
    """Returns a function that opens a cache of numbers."""
    data = tf.data.Dataset.range(SAMPLES).map(lambda n: (tf.cast([n], "float32"), [0.0]))
    return lambda: opened(datacache.from_dataset(data, key="numbers"), None)


def _in_order(position=None):
    """Yields the batches of all epochs from a position on, indefinitely."""
    for share, _ in ORDER.batches(position or datacache.Position(), 0, 1):
        yield share.tolist()


def _trained(cache, data, callbacks=(), **arguments):
    """Trains on data, and returns the sample numbers in each batch, in training order."""
    keras.backend.clear_session()
    seen = []

    class Note(keras.layers.Layer):
        def call(self, x, training=None):
            if training:
                tf.py_function(
                    lambda n: seen.append(n.numpy().ravel().astype(int).tolist()), [x], []
                )
            return x

    model = keras.Sequential([keras.Input((1,)), Note(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=arguments.pop("steps_per_execution", 1))
    if arguments.pop("is_told", True):
        callbacks = [keras_callbacks.CachePosition(cache, data), *callbacks]
    # `fit` warns if it receives a dataset of tf.data and shuffle=True.
    arguments.setdefault("shuffle", isinstance(data, keras.utils.PyDataset))
    model.fit(data, verbose=0, callbacks=[*callbacks], **arguments)
    return seen


CUTS = {
    "dataset": (lambda cache: cache.dataset(BATCH), None),
    "half of an epoch": (lambda cache: cache.dataset(BATCH), STEPS // 2),
    "named steps": (lambda cache: cache.dataset(BATCH), STEPS),
    "repeated": (lambda cache: cache.dataset(BATCH).repeat(), STEPS),
    "repeated, fewer": (lambda cache: cache.dataset(BATCH).repeat(), 4),
    "repeated, more": (lambda cache: cache.dataset(BATCH).prefetch(2).repeat(), 9),
    "pydataset": (lambda cache: cache.pydataset(BATCH), None),
    "pydataset, half": (lambda cache: cache.pydataset(BATCH, workers=3), STEPS // 2),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_resumed_job_reads_the_same_samples(numbers, cut):
    make, steps = CUTS[cut]
    first, last, each = 2, 4, steps or STEPS
    expected = list(itertools.islice(_in_order(), last * each))
    cache = numbers()
    data = make(cache)
    before = _trained(cache, data, epochs=first, steps_per_epoch=steps)
    assert before == expected[: first * each]
    position = ORDER.after(datacache.Position(), first * each, 1)
    assert cache.state_dict(data) == ORDER.state_dict(position)
    again = numbers()
    data = make(again)
    after = _trained(again, data, epochs=last, initial_epoch=first, steps_per_epoch=steps)
    assert before + after == expected
    position = ORDER.after(datacache.Position(), last * each, 1)
    assert again.state_dict(data) == ORDER.state_dict(position)


@pytest.mark.parametrize("cut", ["dataset", "repeated, fewer", "pydataset"])
def test_a_job_killed_within_an_epoch_resumes(numbers, tmp_path, cut):
    make, steps = CUTS[cut]

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    def trained(*more):
        cache = numbers()
        save = keras_callbacks.Checkpoint(tmp_path / "checkpoint", every_n_steps=1)
        return _trained(cache, make(cache), [save, *more], epochs=2, steps_per_epoch=steps)

    with pytest.raises(KeyboardInterrupt):
        trained(Kill())
    expected = list(itertools.islice(_in_order(), 2 * (steps or STEPS)))
    # The killed job ran the third step without saving its result, so the new job repeats the step.
    assert trained() == expected[2:]


def test_fit_may_train_on_a_part_of_each_epoch(numbers):
    cache = numbers()
    seen = _trained(cache, cache.dataset(BATCH).take(2), epochs=2)
    assert seen == [
        batch
        for epoch in range(2)
        for batch in itertools.islice(_in_order(datacache.Position(epoch=epoch)), 2)
    ]


def test_an_execution_may_continue_beyond_the_epoch_of_fit(numbers):
    """Keras trains on whole executions: six steps instead of the requested four."""
    cache = numbers()
    data = cache.dataset(BATCH).repeat()
    arguments = {"steps_per_epoch": 4, "steps_per_execution": 3}
    assert _trained(cache, data, epochs=1, **arguments) == list(itertools.islice(_in_order(), 6))
    assert _trained(cache, data, epochs=2, initial_epoch=1, **arguments) == list(
        itertools.islice(_in_order(datacache.Position(epoch=1)), 6)
    )


@pytest.mark.parametrize("ahead", ["buffer", "execution"])
def test_prefetched_data_do_not_advance_the_position(numbers, ahead):
    cache = numbers()
    data = cache.dataset(BATCH).repeat()
    if ahead == "buffer":
        data, arguments = data.prefetch(64), {}
    else:
        arguments = {"steps_per_execution": 48}
    seen = _trained(cache, data, epochs=2, steps_per_epoch=96, **arguments)
    assert seen == list(itertools.islice(_in_order(), 2 * 96))


def test_a_job_resumes_on_another_number_of_ranks():
    """Two ranks train on the last two samples in a third step, four ranks in the second step."""
    order = datacache.Order(samples=10, global_batch=4, shuffle=False)
    epochs = EpochIterator(order, rank=0, ranks=4)
    begin = order.after(datacache.Position(), 3, ranks=2)
    where = {"begin": (begin.epoch, begin.samples), "is_first": True}
    epochs.begin_epoch(1, 3, math.inf, **where)
    assert epochs.start == datacache.Position(epoch=1)


def test_inconsistent_positions_are_refused(numbers):
    cache = numbers()
    plain = cache.dataset(BATCH)
    repeated = plain.repeat().prefetch(2)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for named, given, steps, received in (
        (None, repeated, 4, "4 steps per epoch in fit, 6 steps per epoch of the cache"),
        (None, repeated, 6, r"another iteration over the data after \d of 6 steps"),
        (plain, repeated, 6, r"another iteration over the data after \d of 6 steps"),
        (plain, plain.take(3), None, r"another iteration over the data after 3 of 6 steps"),
    ):
        position = keras_callbacks.CachePosition(cache, named)
        # Before the last step, wait until the pipeline has prefetched the first batch of the next
        # iteration.
        pause = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: time.sleep(0.5 if batch == 4 else 0.0)
        )
        with pytest.raises(
            Exception,
            match=rf"CachePosition\(cache, data\) must .* within an epoch. Received: {received}",
        ):
            model.fit(
                given,
                epochs=5,
                steps_per_epoch=steps,
                callbacks=[position, pause],
                verbose=0,
                shuffle=False,
            )
    for other in (plain.shuffle(3), plain.unbatch().batch(2), plain.skip(1)):
        with pytest.raises(RuntimeError, match=r"must have the steps of the cache.*Received: data"):
            cache.begin_epoch(0, other)
    with pytest.raises(
        RuntimeError, match=r"initial_epoch=1, 4 steps per epoch, 6 steps in the dataset. Rep"
    ):
        _trained(cache, cache.dataset(BATCH), epochs=2, initial_epoch=1, steps_per_epoch=4)
    with pytest.raises(RuntimeError, match=r"Data that repeat without end require.*Pass it to fit"):
        cache.begin_epoch(0, repeated)
    twice = cache.dataset(BATCH).repeat(2)
    for count in (lambda: next(cache.counted(twice)), lambda: _trained(cache, twice, epochs=1)):
        with pytest.raises(
            RuntimeError, match=r"Data must be at most one epoch.*12 steps, for epochs of 6"
        ):
            count()


def test_batches_of_a_pydataset_are_indexed_like_a_list(numbers):
    cache = numbers()
    data = cache.pydataset(BATCH, workers=2)
    batches = [np.ravel(data[step][0]).tolist() for step in range(-STEPS, STEPS)]
    assert batches == 2 * list(itertools.islice(_in_order(), STEPS))
    for step in (STEPS, -STEPS - 1):
        with pytest.raises(IndexError):
            data[step]


def test_a_loop_over_repeated_data_tracks_its_position(numbers):
    cache = numbers()
    data = cache.dataset(BATCH).repeat()
    seen = []
    for step, (batch, _) in enumerate(cache.counted(data)):
        position = ORDER.after(datacache.Position(), step, 1)
        assert cache.state_dict(data) == ORDER.state_dict(position)
        if step == 15:
            break
        seen.append(np.ravel(batch).astype(int).tolist())
    assert seen == list(itertools.islice(_in_order(), 15))


def test_a_second_iteration_over_repeated_data_is_refused(numbers):
    cache = numbers()
    data = cache.dataset(BATCH).repeat()
    peek = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: next(iter(data)))
    with pytest.raises(
        Exception, match=r"no other code may iterate.*Received: iteration \d+ over repeated"
    ):
        _trained(cache, data, [peek], epochs=20, steps_per_epoch=STEPS)


def test_a_custom_pydataset_may_wrap_a_pydataset_of_the_cache(numbers):
    """If `fit` shuffles the batches, each epoch still has exactly the batches of one epoch."""

    class Augmented(keras.utils.PyDataset):
        def __init__(self, data):
            super().__init__()
            self.data = data

        def __len__(self):
            return len(self.data)

        def __getitem__(self, step):
            return self.data[step]

        def on_epoch_end(self):
            self.data.on_epoch_end()

    cache = numbers()
    data = Augmented(cache.pydataset(BATCH))
    in_order = list(itertools.islice(_in_order(), 3 * STEPS))
    seen = _trained(cache, data, epochs=3)
    for epoch in range(3):
        part = slice(epoch * STEPS, (epoch + 1) * STEPS)
        assert sorted(seen[part]) == sorted(in_order[part])
    assert _trained(cache, data, epochs=3, shuffle=False) == in_order


@pytest.mark.parametrize("kind", ["dataset", "pydataset"])
def test_epochs_without_a_callback_follow_one_another(numbers, kind):
    cache = numbers()
    seen = _trained(cache, getattr(cache, kind)(BATCH), epochs=2, is_told=False)
    assert seen == list(itertools.islice(_in_order(), 2 * STEPS))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("left", [1, 2, 3, 4, 5])
def test_a_rest_with_fewer_samples_than_ranks_joins_the_next_epoch(ranks, left):
    """Such a rest remains if a job on fewer ranks stopped shortly before the end of an epoch."""
    order = datacache.Order(samples=23, global_batch=7)
    begin = datacache.Position(epoch=2, samples=23 - left)
    rest = order.permutation(2)[-left:].tolist()
    each = [list(order.shares(begin, rank, ranks)) for rank in range(ranks)]
    assert sorted(n for rank in each for share, _ in rank for n in share.tolist()) == sorted(rest)
    joined = rest if left < ranks else []
    following = datacache.Position(epoch=3) if joined else begin
    expected = [
        [share.tolist() for share, _ in itertools.islice(order.batches(following, rank, ranks), 4)]
        for rank in range(ranks)
    ]
    seen = [list(itertools.islice(order.batches(begin, rank, ranks), 4)) for rank in range(ranks)]
    first = [n for rank in seen for n in rank[0][0].tolist()]
    assert sorted(first) == sorted([*joined, *(n for rank in expected for n in rank[0])])
    for mine, others in zip(seen, expected, strict=True):
        assert len(mine[0][0]) > 0
        assert [share.tolist() for share, _ in mine[1:]] == others[1:]
        assert [order.after(begin, steps, ranks) for steps in range(1, 5)] == [
            after for _, after in mine
        ]
