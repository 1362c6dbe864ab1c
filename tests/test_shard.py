"""Each sample is in exactly one share, and shares differ by at most one sample."""

import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import LogLines
from tests.helpers.training import check_equal, train_alone

N, SIZES = 100, [1, 2, 3, 4, 7]
Dataset = tf.data.Dataset


def shares(data, size):
    return [tp.shard(data, rank=rank, size=size) for rank in range(size)]


def check_law(parts, expected=range(N), most=1):
    """Checks that one rank has each expected sample, and that lengths differ by `most` at most."""
    assert sorted(sample for part in parts for sample in part) == sorted(expected)
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= most, lengths


def samples(dataset):
    """Returns the numbers in a dataset of scalars or batches."""
    return [int(n) for element in dataset for n in np.ravel(tf.nest.flatten(element)[0])]


@pytest.mark.parametrize("size", SIZES)
def test_arrays_are_shared_without_copies(size):
    x = np.arange(N)
    parts = shares({"x": x, "pair": (x[:, None], [x * 2.0]), "none": None}, size)
    check_law([part["x"] for part in parts])
    for part in parts:
        np.testing.assert_array_equal(part["pair"][0][:, 0], part["x"])
        np.testing.assert_array_equal(part["pair"][1][0], part["x"] * 2)
        assert np.shares_memory(part["x"], x)
        assert part["none"] is None
    check_law([part.numpy() for part in shares(tf.range(N), size)])


def test_frames_are_shared_by_position():
    """The frame is simulated, because pandas may not be installed here."""
    frame = types.SimpleNamespace(shape=(4, 1), iloc=np.arange(4), __getitem__=None)
    assert [part.tolist() for part in shares(frame, 3)] == [[0, 3], [1], [2]]


def test_frames_of_pandas_are_shared_by_position():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": np.arange(5), "b": np.arange(5) * 2.0}, index=list("vwxyz"))
    x, y = tp.shard((frame, frame["a"]), rank=1, size=2)
    assert x.equals(frame.iloc[[1, 3]])
    assert y.equals(frame["a"].iloc[[1, 3]])


def test_arrays_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"same first axis. Received: lengths \[3, 4\]"):
        tp.shard((np.zeros(3), np.zeros(4)), rank=0, size=2)


@pytest.mark.parametrize("data", [3, "text", [1, 2], np.zeros([])])
def test_other_data_are_refused(data):
    with pytest.raises(TypeError, match="`data` must be an array"):
        tp.shard(data, rank=0, size=2)


def test_invalid_ranks_and_sizes_are_refused():
    for rank, size in [(2, 2), (-1, 2), (0, None), (None, 2), (0, 0)]:
        with pytest.raises(ValueError, match="Received: "):
            tp.shard(np.zeros(3), rank=rank, size=size)


class Numbers(keras.utils.PyDataset):
    begins = ends = 0

    def __init__(self, batches, **options):
        super().__init__(**options)
        self.batches = batches

    @property
    def num_batches(self):
        return self.batches

    def __getitem__(self, index):
        return np.array([index])

    def on_epoch_begin(self):
        self.begins += 1

    def on_epoch_end(self):
        self.ends += 1


@pytest.mark.parametrize("size", SIZES)
def test_batches_of_a_pydataset_are_shared(size):
    data = Numbers(N, workers=2, max_queue_size=3)
    parts = shares(data, size)
    check_law([samples(part) for part in parts])
    assert [len(part) for part in parts] == [part.num_batches for part in parts]
    assert (parts[0].workers, parts[0].max_queue_size) == (2, 3)
    parts[-1].on_epoch_begin()
    parts[-1].on_epoch_end()
    assert (data.begins, data.ends) == (1, 1)
    endless = tp.shard(Numbers(None), rank=size - 1, size=size)
    assert endless.num_batches is None
    assert endless[2] == [3 * size - 1]


@pytest.mark.parametrize("size", SIZES)
def test_elements_of_generators_are_shared(size):
    parts = [tp.shard((n for n in range(N)), rank=rank, size=size) for rank in range(size)]
    assert all(isinstance(part, types.GeneratorType) for part in parts)
    check_law([list(part) for part in parts])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Writes four files of 25 records, and returns their pattern."""
    folder = tmp_path_factory.mktemp("records")
    for number in range(4):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as writer:
            for n in range(25 * number, 25 * number + 25):
                writer.write(str(n).encode())
    return str(folder / "*.tfrecord")


def numbers(dataset):
    return dataset.map(tf.strings.to_number)


def offset():
    """Returns a variable and a function that reads it, like Keras's layers."""
    variable = tf.Variable(0, dtype=tf.int64)
    return variable, lambda n: n + variable


PIPELINES = {
    "range": lambda: Dataset.range(N),
    "slices": lambda: Dataset.from_tensor_slices(np.arange(N)),
    "tensor": lambda: Dataset.from_tensors(np.arange(N)).unbatch(),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(N)), tf.int64),
    "shuffle": lambda: Dataset.range(N).shuffle(N),
    "seed": lambda: Dataset.range(N).shuffle(20, seed=5).batch(8),
    "map": lambda: Dataset.range(N).map(lambda n: n + 0, num_parallel_calls=2).shuffle(N).batch(7),
    "loose": lambda: (
        Dataset.range(N).shuffle(N).map(lambda n: n + 0, num_parallel_calls=2, deterministic=False)
    ),
    "zip": lambda: Dataset.zip((Dataset.range(N), Dataset.range(N))).shuffle(N).batch(6),
    "take": lambda: Dataset.range(2 * N).take(N).shuffle(N).batch(4).prefetch(1),
    "skip": lambda: Dataset.range(-N, N).skip(N).cache().shuffle(N).prefetch(tf.data.AUTOTUNE),
    "filter": lambda: Dataset.range(2 * N).filter(lambda n: n < N).shuffle(N),
    "late filter": lambda: Dataset.range(N).shuffle(N).filter(lambda n: n >= 0),
    "flat map": lambda: (
        Dataset.range(10).flat_map(lambda n: Dataset.range(10 * n, 10 * n + 10)).shuffle(N)
    ),
    "interleave": lambda: (
        Dataset.range(10)
        .interleave(
            lambda n: Dataset.range(10 * n, 10 * n + 10), cycle_length=3, num_parallel_calls=2
        )
        .shuffle(N)
    ),
    "padded": lambda: Dataset.range(N).shuffle(N).map(lambda n: n[None]).padded_batch(1),
    "batches": lambda: Dataset.range(N).batch(1).take(N),
    "rebatched": lambda: Dataset.range(N).batch(10).unbatch().batch(3, num_parallel_calls=2),
    "concatenate": lambda: Dataset.range(50).concatenate(Dataset.range(50, N)).shuffle(N),
    "enumerate": lambda: Dataset.range(N).enumerate().map(lambda n, same: n).shuffle(N),
    "late unbatch": lambda: Dataset.range(N).shuffle(N).batch(10).unbatch().batch(4),
    "buckets": lambda: (
        Dataset.range(N)
        .shuffle(N)
        .map(lambda n: tf.fill([n % 3 + 1], n))
        .bucket_by_sequence_length(lambda row: tf.size(row), [2], [1, 1])
        .map(lambda rows: rows[:, 0])
    ),
    "options": lambda: Dataset.range(N).shuffle(N).with_options(tf.data.Options()),
}


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", PIPELINES)
def test_elements_of_pipelines_are_shared(name, size):
    parts = shares(PIPELINES[name](), size)
    # A second iteration shuffles again.
    for _ in range(2):
        check_law([samples(part) for part in parts])


def test_shares_preserve_order_and_structure():
    data = Dataset.range(N).shuffle(N, seed=3).map(lambda n: {"n": n}).batch(8)
    part, again = shares(data, 2)[0], shares(data, 2)[0]
    assert part.element_spec == data.element_spec
    first, second = samples(part), samples(part)
    assert first != second
    assert first == samples(again)


def test_repeated_data_are_complete_in_each_epoch():
    parts = shares(Dataset.range(N).shuffle(N).repeat(2).batch(5), 3)
    check_law([samples(part) for part in parts], [*range(N)] * 2, most=2)
    # With fewer samples than ranks, the repetitions are shared.
    check_law([samples(part) for part in shares(Dataset.range(3).repeat(4), 7)], [*range(3)] * 4)


def test_functions_of_a_share_read_the_same_variable():
    variable, add = offset()
    part = tp.shard(Dataset.range(4).shuffle(4).map(add), rank=1, size=2)
    variable.assign(10)
    assert sorted(samples(part)) == [11, 13]


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("form", ["list", "shuffled", "interleaved", "parallel", "readers"])
def test_files_or_their_records_are_shared(files, form, size):
    names = Dataset.list_files(files, shuffle=form not in ("list", "readers"))
    if size > 4 and form not in ("list", "readers"):
        with pytest.raises(ValueError, match=r"fewer than 7 .* ShuffleDataset.*shuffle=False"):
            shares(numbers(tf.data.TFRecordDataset(names)), size)
        return
    if form in ("list", "shuffled"):
        data = tf.data.TFRecordDataset(names)
    elif form == "readers":
        data = tf.data.TFRecordDataset(names, num_parallel_reads=2)
    else:
        calls = 2 if form == "parallel" else None
        data = names.interleave(tf.data.TFRecordDataset, num_parallel_calls=calls)
    parts = shares(numbers(data).shuffle(10).batch(4), size)
    check_law([samples(part) for part in parts], most=1 if size > 4 else 25)


def test_the_share_precedes_a_filter_in_python():
    """The random filter differs between ranks, and so do the positions of its outputs."""

    def drawn(n):
        return tf.numpy_function(lambda n: np.random.default_rng().random() < 0.5, [n], tf.bool)

    data = Dataset.range(N).map(lambda n: (n, drawn(n))).filter(lambda n, keep: keep).shuffle(N)
    for rank, part in enumerate(shares(data, 3)):
        assert {n % 3 for n in samples(part)} == {rank}


def test_the_share_precedes_an_order_that_depends_on_processors():
    data = Dataset.range(6).interleave(lambda n: Dataset.range(10 * n, 10 * n + 5)).shuffle(N)
    for rank, part in enumerate(shares(data, 2)):
        assert {n // 10 % 2 for n in samples(part)} == {rank}


@pytest.mark.parametrize("places", [lambda d: d.take(60).skip(10), lambda d: d.concatenate(d)])
def test_random_elements_have_positions(places):
    """Random augmentation does not change the positions of elements."""
    data = Dataset.range(N).map(lambda n: (n, tf.random.uniform([])))
    expected = samples(places(Dataset.range(N)))
    check_law([samples(part) for part in shares(places(data), 3)], expected)


def test_each_rank_writes_its_own_cache_file(tmp_path):
    data = Dataset.range(N).cache(str(tmp_path / "c")).shuffle(N).batch(4)
    for _ in range(2):
        check_law([samples(part) for part in shares(data, 3)])
    assert {path.name.split(".")[1] for path in tmp_path.iterdir()} == {
        f"{rank}_of_3" for rank in range(3)
    }


@pytest.mark.parametrize(
    ("data", "received"),
    [
        (lambda: Dataset.range(N).shuffle(N).take(9), "TakeDataset, which depends on the order of"),
        (lambda: Dataset.range(N).cache("file").take(9), "a file cache in TakeDataset or an"),
        (lambda: Dataset.zip(Dataset.range(N).shuffle(N), Dataset.range(N)), "ZipDataset"),
        (lambda: Dataset.range(N).filter(_kept).take(9), "TakeDataset, which depends on the order"),
        (lambda: Dataset.sample_from_datasets([Dataset.range(N)] * 2), "DirectedInterleave"),
        (lambda: Dataset.range(N).shuffle(N).enumerate(), "ZipDataset"),
        (lambda: _opaque(Dataset.range(N).shuffle(N)), "VariantDataset"),
        (lambda: _mapped(deterministic=False).take(9), "TakeDataset, which depends on the order"),
        (lambda: _mapped().take(9).with_options(_free()), "TakeDataset, which depends on the ord"),
        (
            lambda: Dataset.range(4).flat_map(lambda n: _mapped(deterministic=False)).take(9),
            "TakeDataset, which depends on the order of FlatMap",
        ),
    ],
)
def test_pipelines_without_a_position_for_the_share_are_refused(data, received):
    with pytest.raises(ValueError, match=f"before the first shuffle. Received: {received}"):
        tp.shard(data(), rank=0, size=2)


@pytest.mark.parametrize(
    "data",
    [
        lambda: Dataset.range(4).flat_map(lambda n: Dataset.range(4).shard(2, 0)),
        lambda: tp.shard(Dataset.range(N), rank=0, size=2),
    ],
)
def test_sharded_datasets_are_refused(data):
    with pytest.raises(ValueError, match="A dataset must be sharded only once"):
        tp.shard(data(), rank=0, size=2)


def _kept(n):
    return tf.random.uniform([]) < 0.5


def _mapped(**options):
    return Dataset.range(N).map(abs, num_parallel_calls=2, **options)


def _free():
    options = tf.data.Options()
    options.deterministic = False
    return options


def _opaque(data):
    return tf.data.experimental.from_variant(
        tf.data.experimental.to_variant(data), data.element_spec
    )


@pytest.mark.ranks("2x2")
def test_two_changed_lines_train_as_one_process(wire):
    keras.utils.set_random_seed(7 + wire.topology.rank)
    model, (x, y) = models.mlp(), models.mlp.data(48)
    keras.utils.set_random_seed(7)
    alone = models.mlp()
    start = [np.array(w) for w in alone.get_weights()]
    if wire.topology.rank == 0:
        model.set_weights(start)
    expected = train_alone(alone, (x, y), keras.optimizers.SGD(0.1), batch_size=12)
    x, y = tp.shard((x, y))
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.LOSS)
    with LogLines() as lines:
        model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
    check_equal(model.get_weights(), expected)
    is_first = wire.topology.rank == 0
    assert sum("global batch 12 = 4 ranks x 3" in line for line in lines) == is_first
    assert not any("tp.shard" in line for line in lines)


@pytest.mark.ranks("2x1")
@pytest.mark.parametrize("kind", ["arrays", "batches", "generator", "dataset", "files"])
def test_equal_data_are_logged_once(wire, kind, tmp_path):
    x, y = models.mlp.data(24)
    for name in ("a", "b"):
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            for row in range(12):
                writer.write(str(row).encode())
    files = tf.data.TFRecordDataset([str(tmp_path / n) for n in "ab"], num_parallel_reads=2)
    rows = files.map(lambda n: tf.strings.to_number(n, tf.int64))
    data = {
        "arrays": (x, y),
        "batches": (models.Batches(x, y, 6),),
        "generator": ((batch for batch in itertools.repeat((x, y))),),
        "dataset": (Dataset.from_tensor_slices((x, y)).shuffle(24).batch(6),),
        "files": (rows.map(lambda n: (tf.gather(x, n), tf.gather(y, n))).batch(6),),
    }[kind]
    model = models.mlp()
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.LOSS)
    with LogLines() as lines:
        for _ in range(2):
            model.fit(*data, verbose=0, steps_per_epoch=4 if kind == "generator" else None)
    assert sum("tp.shard" in line for line in lines) == (wire.topology.rank == 0)
