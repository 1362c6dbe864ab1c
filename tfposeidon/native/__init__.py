"""Loads the native library, which has three layers.

`lib` is plain C++, `kernels` calls `lib` from TensorFlow, and `ops` registers and documents ops.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

LIBRARY = Path(__file__).with_name("_ops.so")
"""Shared library that `pip install` or `make setup` builds."""


@functools.cache
def library() -> Any:
    """Returns TensorFlow's module of the native ops; the first call loads the library."""
    remedy = (
        "Build it against the installed TensorFlow: `pip install .` in tfposeidon's folder, or "
        "`make setup`."
    )
    if LIBRARY.parents[2].joinpath("setup.py").exists():
        remedy += " If the library is installed, start Python in another folder, or with -P."
    if not LIBRARY.exists():
        raise RuntimeError(
            "Steps on several ranks, LARS, LAMB and tp.ops require tfposeidon's native library. "
            f"Received: no file {LIBRARY}. {remedy}"
        )
    try:
        return tf.load_op_library(str(LIBRARY))
    except tf.errors.NotFoundError as error:
        raise RuntimeError(
            "tfposeidon's native library must be built for the TensorFlow that loads it. "
            f"Received: TensorFlow {tf.__version__}, which reports: {error.message}. {remedy}"
        ) from error


def in_xla() -> bool:
    """Returns whether XLA will compile the traced code, in which native ops cannot run."""
    # TensorFlow has no public function that returns this.
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


@functools.cache
def has_gpu_kernels() -> bool:
    """Returns whether the library was compiled for CUDA: with nvcc and a TensorFlow for GPUs."""
    # Let TensorFlow load the library first, because it finds no ops after a plain CDLL.
    library()
    return hasattr(ctypes.CDLL(str(LIBRARY)), "tfposeidon_gpu_kernels")
