"""Runs native operations on gradients: selection, sums of sparse and encoded vectors, and norms.

All ops have kernels for CPUs, and for CUDA GPUs if tfposeidon is built with nvcc for a TensorFlow
with GPU support. Without GPU kernels, TensorFlow copies tensors from the GPU to the CPU and back.
Both devices return the same results, except that a GPU sums MSTopK's mean in another order, so that
a threshold may differ in its last bits.

All functions work eagerly and in a `tf.function`, but not under XLA, and none has a gradient. They
raise a `RuntimeError` if the native library is not built.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.checks import check_integer
from tfposeidon.native import library

METHODS = ("mstopk", "exact", "dgc")
"""Methods of selection; see `top_k`."""

INT32_LENGTH = 2**31
"""Maximum number of elements of a vector with int32 indices."""


def top_k(
    x: Any, k: Any, method: str = "mstopk", *, steps: int = 30, seed: Any = 0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Selects the `k` elements of largest magnitude.

    NaN and infinity count as larger than all numbers, so that they are selected first.

    Args:
      x: Values, `[n]` floating point. Magnitudes are compared in float32.
      k: Number of elements, 0 to n: a Python integer or a scalar integer tensor.
      method: `"exact"`: the largest elements, ties to the lowest index, as in `tf.math.top_k`.
        `"mstopk"` (default): Algorithm 1 of Shi et al. 2021: all elements above an upper threshold,
        and a random window of the elements between it and a lower threshold. `"dgc"`: double
        sampling of Lin et al. 2018, with the threshold lowered until `k` elements or more are above
        it; the result equals the result of `"exact"`.
      steps: Number of steps of MSTopK's search (its N), at least 0 (default 30).
      seed: Seed of MSTopK's window, an integer or a scalar integer tensor (default 0). The same
        seed gives the same output.

    Returns:
      `values`, `[k]` in the dtype of `x`, and `indices`, `[k]`, ascending: int32, or int64 if the
      static length exceeds 2^31.

    Raises:
      ValueError: If `x` is not floating point, `method` is unknown, `steps` is not an integer of at
        least 0, or `k` or `seed` does not have an integer dtype.
      InvalidArgumentError: If `x` is not a vector, or `k` is outside 0..n.

    Cost: one pass over `x`; more if a sampled threshold was too high.
    Source: Shi et al. 2021 (CommLib), section 3.1. Differs: if, because of ties, no threshold has 1
    to k elements above it, the window covers all elements not below the lower threshold; input that
    is not finite is selected as by `"exact"`; elements are ordered by index.

    >>> import tensorflow as tf, tfposeidon as tp
    >>> values, indices = tp.ops.top_k(tf.constant([0.1, -3.0, 2.0, 0.5]), 2, method="exact")
    >>> values.numpy().tolist(), indices.numpy().tolist()
    ([-3.0, 2.0], [1, 2])
    """
    x = _floating("x", x)
    options = _options(x, k, seed, method, steps)
    values, indices = library().tfposeidon_top_k(x=tf.cast(x, tf.float32), **options)
    # Gather float64 values from `x`, because the compared values were rounded to float32.
    return tf.cast(values, x.dtype) if x.dtype.size <= 4 else tf.gather(x, indices), indices


def error_feedback_top_k(
    residual: Any,
    gradient: Any,
    k: Any,
    method: str = "mstopk",
    *,
    wire_dtype: str | None = None,
    steps: int = 30,
    seed: Any = 0,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Selects from `residual + gradient`; elements that are not selected become the residual.

    `scatter(values) + new_residual = residual + gradient`, with values rounded to `wire_dtype`.

    Args:
      residual: Values that were not selected before, `[n]` float32.
      gradient: Gradient of the current step, `[n]` float32.
      k: Number of elements; see `top_k`.
      method: Method of selection; see `top_k`.
      wire_dtype: Dtype to which values are rounded: `None` (default), `"float16"` or `"bfloat16"`.
        The rounding error is added to the residual.
      steps: Number of steps of MSTopK's search; see `top_k`.
      seed: Seed of MSTopK's window; see `top_k`.

    Returns:
      `values` `[k]` float32, `indices` `[k]` int32 or int64, ascending, and `new_residual` `[n]`
      float32.

    Raises:
      ValueError: As in `top_k`, and if a vector is not float32.
      InvalidArgumentError: As in `top_k`, and if lengths differ.

    Cost: as for `top_k`; `residual` and `gradient` are read, `new_residual` is written.

    >>> import tensorflow as tf, tfposeidon as tp
    >>> values, indices, residual = tp.ops.error_feedback_top_k(
    ...     tf.constant([0.5, 0.0, 0.5]), tf.constant([0.5, 3.0, -0.25]), 1, method="exact"
    ... )
    >>> values.numpy().tolist(), indices.numpy().tolist(), residual.numpy().tolist()
    ([3.0], [1], [1.0, 0.0, 0.25])
    """
    gradient = _float32("gradient", gradient)
    options = _options(gradient, k, seed, method, steps) | {"wire": wire_dtype or "float32"}
    return library().tfposeidon_error_feedback_top_k(
        residual=_float32("residual", residual),
        gradient=gradient,
        **options,
    )


def momentum_correction_top_k(
    residual: Any,
    gradient: Any,
    velocity: Any,
    k: Any,
    momentum: float,
    method: str = "mstopk",
    *,
    wire_dtype: str | None = None,
    steps: int = 30,
    seed: Any = 0,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Selects like `error_feedback_top_k`, with momentum applied before the selection.

    It selects from `residual + (momentum * velocity + gradient)`, and sets the velocity of selected
    elements to 0.

    Args:
      residual: Values that were not selected before, `[n]` float32.
      gradient: Gradient of the current step, `[n]` float32.
      velocity: Momentum buffer, `[n]` float32.
      k: Number of elements; see `top_k`.
      momentum: Factor of the velocity.
      method: Method of selection; see `top_k`.
      wire_dtype: Dtype to which values are rounded; see `error_feedback_top_k`.
      steps: Number of steps of MSTopK's search; see `top_k`.
      seed: Seed of MSTopK's window; see `top_k`.

    Returns:
      `values` `[k]` float32, `indices` `[k]` int32 or int64, ascending, `new_residual` `[n]` and
      `new_velocity` `[n]`, both float32.

    Raises:
      ValueError: As in `top_k`, and if a vector is not float32.
      InvalidArgumentError: As in `top_k`, and if lengths differ.

    Source: Lin et al. 2018 (Deep Gradient Compression), section 3.

    >>> import tensorflow as tf, tfposeidon as tp
    >>> zeros, velocity = tf.zeros([2]), tf.constant([2.0, 2.0])
    >>> values, indices, residual, velocity = tp.ops.momentum_correction_top_k(
    ...     zeros, tf.constant([1.0, 3.0]), velocity, 1, momentum=0.5, method="exact"
    ... )
    >>> values.numpy().tolist(), residual.numpy().tolist(), velocity.numpy().tolist()
    ([4.0], [2.0, 0.0], [2.0, 0.0])
    """
    gradient = _float32("gradient", gradient)
    options = _options(gradient, k, seed, method, steps) | {"wire": wire_dtype or "float32"}
    return library().tfposeidon_momentum_correction_top_k(
        residual=_float32("residual", residual),
        gradient=gradient,
        velocity=_float32("velocity", velocity),
        momentum=momentum,
        **options,
    )


def scatter_add(
    values: Any, indices: Any, size: Any, counts: Sequence[Any] | tf.Tensor | None = None
) -> tf.Tensor:
    """Sums sparse vectors, given as concatenated segments of several ranks.

    The op adds segments in their order, so that the result has the same bits on every rank.

    Args:
      values: Values to add, `[c]` float32.
      indices: Index of each value in the sum, `[c]` int32 or int64; fastest if each segment is
        ascending.
      size: Length of the sum: a Python integer or a scalar integer tensor.
      counts: Number of pairs in each segment, with the sum `c`; by default, there is one segment.

    Returns:
      `[size]` float32; 0 for elements without an index.

    Raises:
      ValueError: If `values`, `indices` or `size` has another dtype.
      InvalidArgumentError: If an index is outside 0..size-1, shapes differ, or the sum of `counts`
        is not `c`.

    Cost: one pass over the sum, and one over the pairs.

    >>> import tensorflow as tf, tfposeidon as tp
    >>> tp.ops.scatter_add([1.0, 2.0, 3.0], [0, 2, 2], 4, counts=[2, 1]).numpy().tolist()
    [1.0, 0.0, 5.0, 0.0]
    """
    values = _float32("values", values)
    indices = tf.convert_to_tensor(indices)
    if indices.dtype not in (tf.int32, tf.int64):
        raise ValueError(
            f"`indices` must be int32 or int64. Received: dtype={indices.dtype.name}. Use tf.cast."
        )
    # The length of a single segment is dynamic, because the static length may be unknown.
    counts = tf.shape(values, tf.int64)[:1] if counts is None else tf.cast(counts, tf.int64)
    return library().tfposeidon_scatter_add(
        values=values, indices=indices, counts=counts, size=_scalar(size)
    )


def encode(x: Any, wire_dtype: str) -> tf.Tensor:
    """Rounds to 16 bits: to the nearest value, ties to even, with denormals preserved.

    Args:
      x: Values, float32 of any shape.
      wire_dtype: `"float16"` or `"bfloat16"`.

    Returns:
      The same shape in `wire_dtype`.

    Raises:
      ValueError: If `x` is not float32.

    >>> import tfposeidon as tp
    >>> tp.ops.encode([1.0, 1.0001, 1e-7], "float16").numpy().tolist()
    [1.0, 1.0, 1.1920928955078125e-07]
    """
    return library().tfposeidon_encode(x=_float32("x", x), T=tf.as_dtype(wire_dtype))


def sum_rows(rows: Any, count: int) -> tf.Tensor:
    """Sums `count` concatenated vectors of 16-bit values, in float32.

    Args:
      rows: Concatenated vectors, `[count * n]` float16 or bfloat16.
      count: Number of vectors.

    Returns:
      `[n]` float32, summed in the vectors' order.

    Raises:
      InvalidArgumentError: If `count` does not divide the length of `rows`.

    Cost: one pass over `rows`.

    >>> import tensorflow as tf, tfposeidon as tp
    >>> tp.ops.sum_rows(tf.constant([1.0, 2.0, 10.0, 20.0], tf.float16), 2).numpy().tolist()
    [11.0, 22.0]
    """
    return library().tfposeidon_sum_rows(rows=rows, count=count)


def l2_norms(tensors: Sequence[Any]) -> tf.Tensor:
    """Computes the Euclidean norms of tensors of any shapes, all in one call.

    Args:
      tensors: Tensors of any shapes, float32; float16 and bfloat16 are cast to it.

    Returns:
      `[len(tensors)]` float32: 0 for a tensor without elements, NaN for a tensor with a NaN.
      Squares are summed in float64, so that none overflows or underflows, and in an order that does
      not depend on the machine.

    Raises:
      ValueError: If there is no tensor, or a tensor has another dtype.

    Cost: one pass over the tensors.

    >>> import tensorflow as tf, tfposeidon as tp
    >>> tp.ops.l2_norms([tf.constant([3.0, 4.0]), tf.fill([2, 2], 1e-30)]).numpy().tolist()[0]
    5.0
    """
    given = [_floating("tensors", tensor) for tensor in tensors]
    if not given or any(tensor.dtype.size > 4 for tensor in given):
        raise ValueError(
            "`tensors` must be one or more tensors, all of dtype float32, float16 or bfloat16. "
            f"Received: {[tensor.dtype.name for tensor in given]}. Use tf.norm for other dtypes."
        )
    return library().tfposeidon_l2_norms(tensors=[tf.cast(tensor, tf.float32) for tensor in given])


def _options(x: tf.Tensor, k: Any, seed: Any, method: str, steps: int) -> dict[str, Any]:
    check_method(method)
    check_integer("steps", steps, 0)
    # An output's dtype is fixed when the op is traced, so it depends only on the static length.
    length = x.shape.num_elements() if x.shape.is_fully_defined() else 0
    return {
        "k": _scalar(k),
        "seed": _scalar(seed),
        "method": method,
        "steps": steps,
        "index_type": tf.int64 if length > INT32_LENGTH else tf.int32,
    }


def check_method(method: str) -> None:
    """Raises `ValueError` if the method of selection is unknown."""
    if method not in METHODS:
        names = ", ".join(f'"{name}"' for name in METHODS)
        raise ValueError(f"The selection method must be one of {names}. Received: {method!r}.")


def _floating(name: str, tensor: Any, dtype: tf.DType | None = None) -> tf.Tensor:
    """Returns a value as a tensor, which must be floating point, or of `dtype` if given."""
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating or tensor.dtype != (dtype or tensor.dtype):
        raise ValueError(
            f"`{name}` must be {dtype.name if dtype else 'floating point'}. Received: "
            f"dtype={tensor.dtype.name}, shape={tensor.shape}. Use tf.cast."
        )
    return tensor


_float32 = functools.partial(_floating, dtype=tf.float32)


def _scalar(value: Any) -> tf.Tensor:
    whole = tf.convert_to_tensor(value)
    if not whole.dtype.is_integer:
        raise ValueError(f"`k`, `seed` and `size` must be integers. Received: {value}. Use int.")
    return tf.cast(whole, tf.int64)
