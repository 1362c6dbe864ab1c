"""TensorFlow's libraries and ops on a GPU, and the GPU's speed in copies and matrix products."""

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import time

import numpy as np

OPENED_BY_TENSORFLOW = (
    "libcuda.so.1",
    "libcudart.so.12",
    "libcublasLt.so.12",
    "libcublas.so.12",
    "libcufft.so.11",
    "libcusparse.so.12",
    "libcusolver.so.11",
    "libcudnn.so.9",
)
"""Libraries without which TensorFlow ignores GPUs."""


def libs(checks):
    """Opens the libraries that TensorFlow loads by name, before TensorFlow is imported."""

    def opens(say, name):
        ctypes.CDLL(name)
        with open("/proc/self/maps") as maps:
            say(*{line.split()[-1] for line in maps if name.split(".so")[0] + "." in line})

    for name in OPENED_BY_TENSORFLOW:
        checks(name, opens, name)


def gpus():
    """Returns the GPUs that TensorFlow sees."""
    import tensorflow as tf

    return tf.config.list_physical_devices("GPU")


def device():
    """Returns the name of the device to check: the GPU, if there is one."""
    return "/GPU:0" if gpus() else "/CPU:0"


def off(found, expected):
    """Returns the largest difference, relative to the largest expected value."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.isfinite(found).all(), "not finite"
    return float(
        np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30)
    )


def at_most(say, limit, found, words="off by"):
    """Prints a difference, and fails if it exceeds the limit."""
    say(f"{words} {found:.1e}")
    assert found < limit, f"{words} {found:.1e}, more than {limit:.0e}"


def whole_float32():
    """Disables TensorFloat-32, the default of float32 products on GPUs since Ampere."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)


def median_ms(function, rounds=15, warm=3):
    """Returns the median milliseconds of a call, including the device's work."""
    import tensorflow as tf

    def timed():
        begin = time.perf_counter()
        kept = function()
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            tf.test.experimental.sync_devices()
        del kept
        return time.perf_counter() - begin

    for _ in range(warm):
        timed()
    return 1e3 * float(np.median([timed() for _ in range(rounds)]))


def see(checks):
    """Checks that TensorFlow finds the GPU and that its libraries work, or ends the process."""
    checks("gpu", _gpu)
    if checks.failures:
        sys.exit(3)
    whole_float32()
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(512, 512)).astype("float32") for _ in range(2))
    for work in (_matmul, _xla, _linear_algebra):
        checks(work.__name__.strip("_"), work, a, b)
    checks("convolution", _convolution, draw)
    if gpus():
        checks("rates", _rates)


def _gpu(say):
    import keras
    import tensorflow as tf

    say(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}")
    for gpu in gpus():
        say(tf.config.experimental.get_device_details(gpu))
    if not gpus():
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            raise RuntimeError("\n".join(["TensorFlow finds no GPU", *_why_no_gpu()]))
        say("no GPU, as requested")


def _why_no_gpu():
    """Returns the log of TensorFlow while it searches for GPUs."""
    code = "import tensorflow as tf; tf.config.list_physical_devices('GPU')"
    loud = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1,dlopen_checker=1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | loud, capture_output=True, text=True
    )
    return [line for line in done.stderr.splitlines() if re.search("dso|dlopen|GPU|CUDA", line)][
        -8:
    ]


def _matmul(say, a, b):
    import tensorflow as tf

    for dtype, limit in (("float32", 1e-5), ("float16", 3e-3), ("bfloat16", 2e-2)):
        with tf.device(device()):
            product = tf.matmul(tf.cast(a, dtype), tf.cast(b, dtype))
        assert device()[1:4] in product.backing_device, product.backing_device
        at_most(say, limit, off(tf.cast(product, "float32"), a.astype("float64") @ b), dtype)


def _xla(say, a, b):
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def compiled(p, q):
        return tf.nn.relu(tf.matmul(p, q)) + tf.reduce_sum(tf.exp(-tf.abs(p)))

    with tf.device(device()):
        found = compiled(tf.constant(a), tf.constant(b))
    at_most(say, 1e-4, off(found, np.maximum(a @ b, 0) + np.exp(-np.abs(a)).sum()))


def _linear_algebra(say, a, _):
    import tensorflow as tf

    # Orthogonal initializers need cuSOLVER.
    with tf.device(device()):
        q, _ = tf.linalg.qr(tf.constant(a[:64, :64]))
        at_most(say, 1e-5, off(tf.matmul(q, q, transpose_a=True), np.eye(64)))


def _convolution(say, draw):
    import tensorflow as tf

    image, kernel = draw.normal(size=(8, 16, 16, 8)), draw.normal(size=(3, 3, 8, 16))
    found = []
    for where in (device(), "/CPU:0"):
        with tf.device(where), tf.GradientTape() as tape:
            given = [tf.constant(v, tf.float32) for v in (image, kernel)]
            tape.watch(given)
            y = tf.nn.relu(tf.nn.conv2d(*given, 1, "SAME"))
            found.append([y, *tape.gradient(y, given)])
    at_most(say, 1e-5, max(off(p, q) for p, q in zip(*found, strict=True)))


def _rates(say):
    import tensorflow as tf

    big = tf.random.normal([2**28])
    say(f"copies {2 * 4 * 2**28 / median_ms(lambda: tf.negative(big)) / 1e9:.2f} TB/s")
    wide = tf.cast(tf.random.normal([8192, 8192]), tf.bfloat16)
    ms = median_ms(lambda: tf.matmul(wide, wide))
    say(f"bfloat16 products {2 * 8192**3 / ms / 1e9:.0f} TFLOP/s")
