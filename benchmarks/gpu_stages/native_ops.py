"""The native ops on GPU tensors: equality with the CPU, and times relative to a copy."""

import functools
import re

import numpy as np
import tensorflow as tf

from benchmarks.gpu_stages.device import device, gpus, median_ms
from tfposeidon import native
from tfposeidon import ops as tp_ops
from tfposeidon.exchange import replicas

KINDS = ("normal", "heavy", "huge", "mostly zero", "constant", "tiny", "ties", "not finite")
EXACT = ("exact", "dgc")
WIRES = (None, "float16", "bfloat16")


def draw(kind, n, seed=0):
    """Returns a float32 vector that is difficult for selection, rounding or sums."""
    generator = np.random.default_rng([seed, n])
    x = generator.normal(size=n)
    if kind == "heavy":
        x *= np.exp(5 * generator.normal(size=n))
    if kind == "mostly zero":
        x[generator.random(n) > 0.01] = 0
    if kind == "huge":
        x = np.clip(1e38 * x, -3.4e38, 3.4e38)
    if kind == "constant":
        x[:] = -0.5
    if kind == "tiny":
        x *= 1e-41
    if kind == "ties":
        x = np.round(2 * x) / 2
    if kind == "not finite" and n:
        x[generator.integers(0, n, 3)] = np.nan, np.inf, -np.inf
    return x.astype("float32")


def on(where, function, *arrays):
    """Runs a function on a device, with arrays as tensors, and returns its results."""
    with tf.device(where):
        found = function(*map(tf.constant, arrays))
    return found if isinstance(found, list | tuple) else [found]


def same_bits(found, expected, words):
    """Fails unless tensors have the same dtypes, shapes and bits; all NaN are equal."""
    for p, q in zip(found, expected, strict=True):
        p, q = np.asarray(p), np.asarray(q)
        assert (p.dtype, p.shape) == (q.dtype, q.shape), (words, p.dtype, p.shape, q.shape)
        same = np.frombuffer(p.tobytes(), "u1") == np.frombuffer(q.tobytes(), "u1")
        same = same.reshape(p.size, p.dtype.itemsize).all(1) if p.size else same
        both_nan = np.isnan(p.astype("float32")) & np.isnan(q.astype("float32"))
        wrong = np.flatnonzero(~(same.reshape(p.shape) | both_nan)) if p.size else ()
        assert len(wrong) == 0, f"{words}: {len(wrong)} of {p.size} differ, first at {wrong[0]}"


def ops(checks):
    """Compares each native op on GPU tensors with the same op on CPU tensors."""
    checks("kernels", _kernels)
    # An op without a GPU kernel then raises an error.
    tf.config.set_soft_device_placement(not gpus())
    lengths = (1, 2, 63, 1000) if checks.small else (1, 2, 63, 1000, 100_003)
    for name, cases in {
        "top_k": lambda: _selections(lengths),
        "error_feedback_top_k": lambda: _feedbacks(lengths),
        "momentum_correction_top_k": lambda: _corrections(lengths),
        "scatter_add": lambda: _scatters(lengths),
        "encode_and_sum_rows": lambda: _codings(lengths),
        "l2_norms": _norms,
    }.items():
        checks(name, _compared, cases)
    checks("mstopk", _mstopk, lengths)
    checks("refusals", _refusals)
    checks("many_calls_at_once", _many_calls)
    checks("checksums", _checksums)
    tf.config.set_soft_device_placement(True)


def _kernels(say):
    say(f"GPU kernels: {native.has_gpu_kernels()}")
    assert native.has_gpu_kernels() or not gpus(), "the library was built without nvcc"


def _compared(say, cases):
    count = 0
    for words, function, arrays in cases():
        same_bits(on(device(), function, *arrays), on("/CPU:0", function, *arrays), words)
        count += 1
    say(f"{count} cases, the same bits")


def _ks(n):
    return sorted({0, 1, max(1, n // 1000), max(1, n // 3), n})


def _selections(lengths):
    for n in lengths:
        for kind in KINDS:
            for k in _ks(n):
                for method in EXACT:
                    call = functools.partial(tp_ops.top_k, k=k, method=method, seed=1)
                    yield f"{method} {kind} n={n} k={k}", call, [draw(kind, n)]


def _feedbacks(lengths):
    for n in lengths:
        for kind in KINDS if n == max(lengths) else KINDS[:1]:
            for method in EXACT:
                for wire in WIRES:
                    for k in _ks(n):
                        options = {"k": k, "method": method, "wire_dtype": wire}
                        call = functools.partial(tp_ops.error_feedback_top_k, **options)
                        yield f"{options} {kind} n={n}", call, [draw(kind, n), draw("normal", n, 1)]


def _corrections(lengths):
    for words, call, arrays in list(_feedbacks(lengths))[::3]:
        call = functools.partial(tp_ops.momentum_correction_top_k, momentum=0.9, **call.keywords)
        yield words, call, [*arrays, draw("normal", len(arrays[0]), 2)]


def _scatters(lengths):
    generator = np.random.default_rng(0)
    for size in lengths:
        for counts in ([3, 0, 5], [1000] * 4, [0], [size]):
            values = draw("heavy", sum(counts))
            for dtype in ("int32", "int64"):
                indices = generator.integers(0, size, sum(counts)).astype(dtype)
                call = functools.partial(tp_ops.scatter_add, size=size, counts=counts)
                yield f"size={size} counts={counts} {dtype}", call, [values, indices]


def _codings(lengths):
    nasty = np.float32([0, -0.0, np.inf, -np.inf, 70_000, 1e-41, 65_519, 65_520, 6e-8, 3e38])
    for kind in KINDS:
        x = np.concatenate([draw(kind, max(lengths)), nasty])
        for wire in WIRES[1:]:
            yield f"encode {wire} {kind}", functools.partial(tp_ops.encode, wire_dtype=wire), [x]
            for count in (1, 2, 4):

                def summed(v, wire=wire, count=count):
                    return tp_ops.sum_rows(tp_ops.encode(v, wire), count)

                yield f"sum_rows {wire} {count} {kind}", summed, [x[: len(x) // 4 * 4]]


def _norms():
    for shapes in ([()], [(3,), (0,), (4, 5)], [(1,)] * 200, [(70_001,), (2,), (513, 129)]):
        # Norms must not be denormal, which TensorFlow flushes on CPUs but not on GPUs.
        for scale in (1.0, 1e-30, 1e35, np.inf):
            sizes = [int(np.prod(shape)) for shape in shapes]
            with np.errstate(invalid="ignore"):
                vectors = [np.float32(scale) * draw("normal", n, i) for i, n in enumerate(sizes)]
            tensors = [v.reshape(s) for v, s in zip(vectors, shapes, strict=True)]
            yield f"{shapes[:3]} {scale}", lambda *given: tp_ops.l2_norms(given), tensors


def _mstopk(say, lengths):
    """Compares MSTopK; a few indices may differ, because its mean is rounded differently."""
    shared = []
    for n in lengths:
        for kind in KINDS:
            x = draw(kind, n)
            for k in filter(None, _ks(n)):
                call = functools.partial(tp_ops.top_k, k=k, seed=7)
                values, indices = map(np.asarray, on(device(), call, x))
                assert indices.shape == (k,), (n, kind, k)
                assert (np.diff(indices) > 0).all(), (n, kind, k)
                same_bits([values], [x[indices]], (n, kind, k))
                shared.append(np.isin(indices, np.asarray(on("/CPU:0", call, x)[1])).mean())
    say(f"{len(shared)} cases share {np.mean(shared):.4f} of their indices with the CPU's")
    assert np.mean(shared) > 0.95


def _refusals(say):
    for words, call in (
        ("k=10", lambda: tp_ops.top_k(tf.ones([9]), 10)),
        (r"indices\[1\]=9", lambda: tp_ops.scatter_add([1.0, 1.0], [0, 9], 9)),
        ("the same shape", lambda: tp_ops.error_feedback_top_k(tf.ones([9]), tf.ones([8]), 1)),
        ("sum to", lambda: tp_ops.scatter_add([1.0, 1.0], [0, 1], 9, counts=[1, 2])),
    ):
        with tf.device(device()):
            message = ""
            try:
                call()
            except tf.errors.InvalidArgumentError as error:
                message = str(error)
            assert re.search(words, message), f"expected {words!r}, got {message!r}"
    # The device must still work.
    same_bits(
        on(device(), lambda v: tp_ops.top_k(v, 3, "exact")[0], np.ones(9, "float32")),
        [np.ones(3, "float32")],
        "after refusals",
    )
    say("4 of 4 raised, and the device still works")


def _many_calls(say):
    """Checks ops on one stream whose memory is released while they are still queued."""

    @tf.function(autograph=False)
    def chain(v):
        total = tf.zeros_like(v)
        for seed in range(20):
            values, indices = tp_ops.top_k(v * (1.0 + seed), 3000, "exact")
            total += tp_ops.scatter_add(values, indices, v.shape[0])
        return total

    x = draw("normal", 300_000)
    found = [on(device(), chain, x) for _ in range(6)]
    expected = on("/CPU:0", chain, x)
    for one in found:
        same_bits(one, expected, "chain")
    say("120 selections and sums in 6 graphs")


def _checksums(say):
    """Checks that the checksums that `fit` compares are the same on every device."""
    for dtype in ("float32", "float16", "bfloat16", "float64", "int64", "uint8"):
        x = draw("normal", 1_100_003).astype(tf.as_dtype(dtype).as_numpy_dtype)
        found, expected = (
            on(where, lambda v: replicas.sums([v]), x) for where in (device(), "/CPU:0")
        )
        assert found == expected, dtype
    with tf.device(device()):
        v = tf.random.normal([25_000_000])
    say(f"{median_ms(lambda: replicas.sums([v]), 3):.1f} ms for 100 MB")


def times(checks):
    """Times the ops on 25.6 million values, the size of ResNet-50."""
    n = 100_003 if checks.small else 25_557_032
    k = n // 100
    drawn = (np.random.default_rng(0).laplace(size=n) * 1e-3).astype("float32")
    with tf.device(device()):
        x = tf.identity(tf.constant(drawn))
        residual, velocity = tf.reverse(x, [0]), x * 0.5
        values, indices = tp_ops.top_k(x, k, "exact")
        many = tf.tile(values, [16]), tf.tile(indices, [16])
    copy_ms = median_ms(lambda: tf.negative(x))

    def timed(say, function, *given):
        call = tf.function(function, autograph=False)
        with tf.device(device()):
            ms = median_ms(lambda: call(*given), 9)
        say(f"{ms:.3f} ms, {ms / copy_ms:.1f} copies")

    for method in tp_ops.METHODS:
        checks(f"top_k_{method}", timed, lambda v, method=method: tp_ops.top_k(v, k, method), x)
    for name, function, given in (
        ("tf_math_top_k", lambda v: tf.math.top_k(tf.abs(v), k, sorted=False), [x]),
        ("error_feedback", lambda r, v: tp_ops.error_feedback_top_k(r, v, k), [residual, x]),
        (
            "momentum_correction",
            lambda r, v, s: tp_ops.momentum_correction_top_k(r, v, s, k, 0.9),
            [residual, x, velocity],
        ),
        ("scatter_add_of_16", lambda v, i: tp_ops.scatter_add(v, i, n, [k] * 16), many),
        ("encode_float16", lambda v: tp_ops.encode(v, "float16"), [x]),
        ("l2_norms_of_160", lambda v: tp_ops.l2_norms(tf.split(v[: n // 160 * 160], 160)), [x]),
        ("to_the_host", on_host, [x]),
    ):
        checks(name, timed, function, *given)


def on_host(tensor):
    """Returns a copy in the host's memory."""
    with tf.device("/CPU:0"):
        return tf.identity(tensor)
