"""The native library: `lib` is plain C++, `kernels` are thin, `ops` holds signatures and documentation."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

LIBRARY = Path(__file__).with_name("_ops.so")


@functools.cache
def library() -> Any:
    """TensorFlow's module of the native ops, loaded at the first call.

    Raises:
      RuntimeError: If the library was not built, or for another TensorFlow than the one installed.
    """
    remedy = "Build it against the installed TensorFlow: `pip install .` in tfposeidon's folder, or `make setup`."
    if not LIBRARY.exists():
        raise RuntimeError(
            f"Sparse schemes, LARS, LAMB and tp.ops need tfposeidon's native library. Received: no {LIBRARY}. {remedy}"
        )
    try:
        return tf.load_op_library(str(LIBRARY))
    except tf.errors.NotFoundError as error:
        raise RuntimeError(
            f"tfposeidon's native library must be built for the TensorFlow that loads it. Received: TensorFlow "
            f"{tf.__version__}, which says: {error.message}. {remedy}"
        ) from error


def in_xla() -> bool:
    """Whether what is traced will be compiled by XLA, which knows no op of ours."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


@functools.cache
def has_gpu_kernels() -> bool:
    """Whether the library was compiled for CUDA too: with nvcc, for a TensorFlow with GPUs."""
    library()  # First: ops that come with a plain CDLL are lost to TensorFlow.
    return hasattr(ctypes.CDLL(str(LIBRARY)), "tfposeidon_gpu_kernels")
