"""Compares native ops with plain NumPy on random and difficult inputs, and tests refused input."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.gpu_stages.native_ops import draw
from tfposeidon import native, ops

KINDS = ("normal", "heavy", "huge", "mostly zero", "constant", "not finite")


def _key(x):
    return np.abs(x).view("uint32")


def _exact(x, k):
    return np.sort(np.argsort(-_key(x).astype("int64"), kind="stable")[:k])


def _splitmix64(seed, bound):
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) % bound


def _mean(a):
    """Returns the mean like native/lib/inner_loops.h, which first sums four elements in float32.

    The four elements are 16 apart; their sums are added in float64.
    """
    whole = len(a) // 64 * 64
    fours = a[:whole].reshape(-1, 4, 16)
    sums = (fours[:, 0] + fours[:, 1]) + (fours[:, 2] + fours[:, 3])
    return np.float32((sums.sum(dtype="float64") + a[whole:].sum(dtype="float64")) / len(a))


def _algorithm_1(x, k, steps, seed):
    """Selects like MSTopK, line by line, with the corrections that tp.ops.top_k lists."""
    a = np.abs(x)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, u = _mean(a), a.max()
    if not np.isfinite(mean):
        return _exact(x, k)
    left, right = np.float32(0), np.float32(1)
    k1, k2, thres1, thres2 = 0, len(x), np.float32(0), np.float32(0)
    for _ in range(steps):
        ratio = left + (right - left) / np.float32(2)
        thres = mean + ratio * (u - mean)
        nnz = np.count_nonzero(a >= thres)
        if nnz <= k:
            right = ratio
            if nnz > k1:
                k1, thres1 = nnz, thres
        else:
            left = ratio
            if nnz < k2:
                k2, thres2 = nnz, thres
    first = (a >= thres1) & (k1 > 0)
    second = np.flatnonzero(~first & (a >= thres2))
    start = _splitmix64(seed, len(second) - (k - k1) + 1)
    return np.sort(np.concatenate([np.flatnonzero(first), second[start : start + k - k1]]))


CASES = [
    (n, k)
    for n in (1, 2, 63, 1000, 100_003)
    for k in sorted({1, max(1, n // 1000), max(1, n // 3), n})
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), CASES)
def test_top_k_equals_the_references(kind, n, k):
    x = draw(kind, n)
    expected = {"exact": _exact(x, k), "dgc": _exact(x, k), "mstopk": _algorithm_1(x, k, 30, 7)}
    for method, indices in expected.items():
        values, got = ops.top_k(x, k, method, seed=7)
        np.testing.assert_array_equal(got, indices, method)
        np.testing.assert_array_equal(values, x[indices])


@pytest.mark.parametrize("kind", KINDS)
def test_exact_selection_equals_top_k_of_tensorflow(kind):
    x = draw(kind, 5000)
    if kind != "not finite":  # TensorFlow does not order NaN.
        _, indices = tf.math.top_k(tf.abs(x), 77)
        np.testing.assert_array_equal(ops.top_k(x, 77, "exact")[1], np.sort(indices))


def test_empty_inputs_give_empty_outputs():
    for method in ops.METHODS:
        for x, k in ((tf.zeros([0]), 0), (tf.ones([5]), 0)):
            values, indices = ops.top_k(x, k, method)
            assert values.shape == indices.shape == (0,)
    np.testing.assert_array_equal(
        ops.scatter_add(tf.zeros([0]), tf.zeros([0], tf.int32), 3), np.zeros(3)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floating_dtypes_are_preserved(dtype):
    x = tf.cast(draw("normal", 999), dtype)
    values, indices = ops.top_k(x, 10, "exact")
    assert values.dtype == x.dtype
    assert indices.dtype == tf.int32
    np.testing.assert_array_equal(values, tf.gather(x, indices))


def test_shapes_are_known_while_tracing():
    @tf.function
    def select(x, k):
        values, indices = ops.top_k(x, 5)
        assert values.shape == indices.shape == (5,)
        assert ops.top_k(x, k)[0].shape.as_list() == [None]
        assert ops.scatter_add(values, indices, 9).shape == (9,)
        assert ops.error_feedback_top_k(x, x, k)[2].shape == x.shape
        return values

    select(tf.ones([20]), tf.constant(3))


@pytest.mark.parametrize("wire_dtype", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("method", ops.METHODS)
@pytest.mark.parametrize("k", [0, 1, 90, 9001])
def test_error_feedback_sends_or_retains_each_value(method, k, wire_dtype):
    n = 9001
    residual, gradient, velocity = (draw("normal", n, seed) for seed in (1, 2, 3))
    values, indices, rest = ops.error_feedback_top_k(
        residual, gradient, k, method, wire_dtype=wire_dtype
    )
    wanted = residual + gradient
    np.testing.assert_array_equal(indices, ops.top_k(wanted, k, method)[1])
    if wire_dtype:
        np.testing.assert_array_equal(values, tf.cast(tf.cast(values, wire_dtype), tf.float32))
    np.testing.assert_array_equal(ops.scatter_add(values, indices, n) + rest, wanted)

    values, indices, rest, speed = ops.momentum_correction_top_k(
        residual, gradient, velocity, k, 0.9, method, wire_dtype=wire_dtype
    )
    faster = velocity * np.float32(0.9) + gradient
    np.testing.assert_array_equal(ops.scatter_add(values, indices, n) + rest, residual + faster)
    masked = np.isin(np.arange(n), indices)
    np.testing.assert_array_equal(speed, np.where(masked, 0, faster))


@pytest.mark.parametrize("size", [700, 2**22 - 1, 2**22 + 12_345])
def test_scatter_add_is_a_sum_in_rank_order(size):
    """Above 2^22 elements, sums are written past the caches."""
    generator = np.random.default_rng(0)
    for counts in ([3, 0, 5], [1000] * 4, [0]):
        ranks = [generator.integers(0, size, count) for count in counts]
        values = generator.normal(size=sum(counts)).astype("float32")
        # The indices of a rank are in any order, or ascend like those of a selection.
        for indices in (np.concatenate(ranks), np.concatenate([np.sort(own) for own in ranks])):
            expected = np.zeros(size, "float32")
            np.add.at(expected, indices, values)
            for dtype in (tf.int32, tf.int64):
                got = ops.scatter_add(values, tf.cast(indices, dtype), size, counts)
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_encoding_to_16_bits_rounds_like_numpy(dtype):
    x = np.concatenate(
        [draw("heavy", 6001), np.float32([0, -0.0, np.inf, 70_000, 1e-41, 65_519, 65_520])]
    )
    encoded = ops.encode(x, dtype)
    with np.errstate(over="ignore"):
        expected = x.astype(tf.as_dtype(dtype).as_numpy_dtype)
    np.testing.assert_array_equal(encoded.numpy().astype("float32"), expected.astype("float32"))
    rows = tf.concat([encoded, encoded, encoded], 0)
    half = encoded.numpy().astype("float32")
    np.testing.assert_array_equal(ops.sum_rows(rows, 3), half + half + half)


def test_invalid_arguments_are_refused_in_python():
    x = tf.ones([9])
    with pytest.raises(
        ValueError, match=r"must be one of \"mstopk\", \"exact\", \"dgc\". Received: 'sort'"
    ):
        ops.top_k(x, 3, "sort")
    with pytest.raises(
        ValueError, match=r"`x` must be floating point. Received: dtype=int32, shape=\(9,\)"
    ):
        ops.top_k(tf.ones([9], tf.int32), 3)
    with pytest.raises(ValueError, match=r"`k`, `seed` and `size` must be integers. Received: 1.9"):
        ops.top_k(x, 1.9)
    with pytest.raises(ValueError, match=r"`steps` must be an integer >= 0. Received: steps=-1"):
        ops.top_k(x, 3, steps=-1)
    with pytest.raises(ValueError, match=r"`residual` must be float32. Received: dtype=float64"):
        ops.error_feedback_top_k(tf.ones([9], tf.float64), x, 3)
    with pytest.raises(
        ValueError, match=r"`indices` must be int32 or int64. Received: dtype=float32"
    ):
        ops.scatter_add(x, x, 9)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            r"`k` must be in 0 .. n. Received: k=10 for a vector of n=9",
            lambda op: op.top_k(tf.ones([9]), 10),
        ),
        (
            r"`k` must be in 0 .. n. Received: k=-1 for a vector of n=9",
            lambda op: op.top_k(tf.ones([9]), -1),
        ),
        (r"must be a vector. Received: shape \[3,3\]", lambda op: op.top_k(tf.ones([3, 3]), 1)),
        (
            r"must have the same shape. Received: \[9\] and \[8\]",
            lambda op: op.error_feedback_top_k(tf.ones([9]), tf.ones([8]), 1),
        ),
        (
            r"Indices must be in 0 .. size - 1. Received: indices\[1\]=9 for size=9",
            lambda op: op.scatter_add([1.0, 1.0], [0, 9], 9),
        ),
        (
            r"Received: indices\[0\]=-1 for size=9",
            lambda op: op.scatter_add([1.0, 1.0], [-1, 3], 9),
        ),
        (
            r"Values and indices must be vectors of the same length. Received: \[2\] and \[1\]",
            lambda op: op.scatter_add([1.0, 1.0], [0], 9),
        ),
        (
            r"`counts` must .* sum to .* 2 values",
            lambda op: op.scatter_add([1.0, 1.0], [0, 1], 9, counts=[1, 2]),
        ),
        (
            r"`counts` must .* sum to",
            lambda op: op.scatter_add([1.0, 1.0], [0, 1], 9, counts=[3, -1]),
        ),
        (
            r"`size` must not be negative. Received: size=-2",
            lambda op: op.scatter_add([1.0], [0], -2),
        ),
        (r"Received: shape \[9\], count=2", lambda op: op.sum_rows(tf.ones([9], tf.float16), 2)),
    ],
)
def test_invalid_inputs_of_native_ops_are_refused(message, call):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        call(ops)


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    with pytest.raises(
        RuntimeError, match=r"native library. Received: no file .*missing.so. Build it"
    ):
        native.library.__wrapped__()
    (tmp_path / "missing.so").write_bytes(b"not a library")
    with pytest.raises(
        RuntimeError, match=r"for the TensorFlow that loads it. Received: TensorFlow 2"
    ):
        native.library.__wrapped__()


# ---------------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "shapes", [[()], [(3,), (0,), (4, 5)], [(1,)] * 200, [(70_001,), (2,), (513, 129)]]
)
def test_norms_equal_those_of_numpy(shapes, dtype):
    tensors = [
        tf.cast(np.random.default_rng(i).normal(size=shape), dtype)
        for i, shape in enumerate(shapes)
    ]
    for run in (ops.l2_norms, tf.function(ops.l2_norms)):
        found = run(tensors)
        assert found.shape == (len(shapes),)
        assert found.dtype == tf.float32
        expected = [np.linalg.norm(tf.cast(tensor, "float64").numpy()) for tensor in tensors]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_norms_neither_overflow_nor_underflow():
    tensors = [tf.fill([5000], scale) for scale in (1e-35, 1e35, 0.0)]
    np.testing.assert_allclose(
        ops.l2_norms(tensors), np.sqrt(5000) * np.array([1e-35, 1e35, 0.0]), rtol=1e-6
    )


def test_norms_of_non_finite_tensors_are_not_finite():
    found = ops.l2_norms(
        [tf.constant([1.0, float("nan")]), tf.constant([float("inf"), 1.0]), tf.ones([4])]
    ).numpy()
    assert np.isnan(found[0])
    assert found[1:].tolist() == [float("inf"), 2.0]


@pytest.mark.parametrize("tensors", [[], [[1]], [tf.zeros([2], tf.float64)]])
def test_invalid_inputs_of_norms_are_refused(tensors):
    with pytest.raises(
        ValueError,
        match=r"`tensors` must be one or more tensors|`tensors` must be floating point",
    ):
        ops.l2_norms(tensors)
