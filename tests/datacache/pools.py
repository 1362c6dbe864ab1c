"""Creates stores for tests, with samples that are reproducible from their indices."""

import json

import numpy as np

from datacache.pool.pool import Pool
from datacache.pool.spec import Layout, PoolSpec, SampleShard

SAMPLES = 40


LAYOUT = Layout.of(
    sample := [np.zeros((5, 3), "uint8"), np.float32(0), np.zeros(2, "int64"), np.array(True)]
)


def drawn_sample(index):
    """Returns the sample with this index."""
    draw = np.random.default_rng(index)
    pixels = draw.integers(0, 256, (5, 3)).astype("uint8")
    return [pixels, np.float32(draw.normal()), np.array([index, -index]), np.array(index % 2 == 0)]


def new_pool(folder, slots=SAMPLES):
    return Pool(
        folder,
        lambda: PoolSpec(layout=LAYOUT, shard=SampleShard(samples=SAMPLES, slots=slots)),
    )


def check_samples(pool, samples):
    for arrays, place in zip(zip(*pool.gather(samples), strict=True), samples, strict=True):
        for array, expected in zip(arrays, drawn_sample(place), strict=True):
            np.testing.assert_array_equal(array, expected)


VARYING = [
    np.zeros((2, 3), "int32"),
    np.array(b"text", object),
    np.float32(0),
    np.array([[b"a", b"bc"]], object),
]


def varying_sample(index):
    draw = np.random.default_rng(index)
    texts = np.array([[b"x" * int(draw.integers(9)), b""]] * int(draw.integers(4)), object).reshape(
        -1, 2
    )
    numbers = draw.integers(0, 99, (int(draw.integers(5)), 3)).astype("int32")
    return [
        numbers,
        np.array(bytes(draw.bytes(int(draw.integers(30)))), object),
        np.float32(index),
        texts,
    ]


def varying_pool(folder, heap_bytes=10**5):
    layout = Layout.of(VARYING, [[0], [], [], [0]])
    return Pool(
        folder,
        lambda: PoolSpec(
            layout=layout, shard=SampleShard(samples=SAMPLES, slots=SAMPLES), heap_bytes=heap_bytes
        ),
    )


def fill_all(pool, order):
    return sum(pool.put(index, varying_sample(index)) for index in order) == len(order)


def check_varying(pool, samples):
    assert pool.find_corrupt(samples, recheck=True).size == 0
    for index in samples:
        for array, expected in zip(pool.read_sample(index), varying_sample(index), strict=True):
            np.testing.assert_array_equal(array, expected)


def section(folder, name):
    """Returns the offset in bytes of a section in the file of a store."""
    path = folder / "datacache.store"
    line = path.read_bytes().partition(b"\n")[0] + b"\n"
    return len(line) + PoolSpec.from_dict(json.loads(line)["store"]).sections[name][0]


def change_header(folder, **changed):
    """Changes values in the header of a store, but neither its digest nor its sections."""
    path = folder / "datacache.store"
    line, _, rest = path.read_bytes().partition(b"\n")
    content = json.dumps(json.loads(line) | changed).ljust(len(line)).encode()
    path.write_bytes(content + b"\n" + rest)


def claimed(pool, sample):
    with pool.claim(np.array([sample])) as mine:
        return mine.tolist()
