"""Functions that count samples or tokens of a batch, to weight this rank's gradients.

By default, `fit` assumes that a loss is a mean over the samples of the batch, and weights ranks by
their `batch_size`. For other losses, pass another function from this module. A custom function
receives the argument of the model's `train_step`, and returns a number::

    optimizer = tp.DistributedOptimizer(adam, sample_count=tp.sample_counts.Unmasked())
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon.config import Configured

SampleCount = Callable[[Any], Any]
"""Function from a batch, the argument of `train_step`, to a scalar, or to `None` if unknown."""


def name(count: SampleCount) -> str:
    """Returns the name of a function, or of a callable object's class: the same on all ranks."""
    return getattr(count, "__name__", type(count).__name__)


def counted(count: SampleCount, data: Any) -> Any:
    """Returns the count of a batch, a scalar that depends on the batch; `None` if it is unknown."""
    # The dependency prevents ranks with exhausted input from counting if `count` ignores the batch.
    number = count(data)
    if number is None:
        return None
    with tf.control_dependencies(tensors(data)):
        number = tf.identity(number)
    if number.shape.rank != 0:
        raise ValueError(
            "`sample_count` must return a single number for each batch. Received: shape "
            f"{tuple(number.shape)}. Return its sum."
        )
    return number


def tensors(data: Any) -> list[tf.Tensor]:
    """Returns the tensors of a batch, and the components of ragged and sparse tensors."""
    leaves = tf.nest.flatten(keras.tree.flatten(data), expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def batch_size(data: Any) -> Any:
    """Counts the samples of a batch, for losses that are means over samples.

    Args:
      data: Batch, the argument of a train step.

    Returns:
      Scalar int32: length of the first axis of the first dense, ragged or sparse tensor that has
      an axis; `None` if there is no such tensor.

    >>> import tensorflow as tf
    >>> int(batch_size((tf.zeros([32, 784]), tf.zeros([32]))))
    32
    """
    # Include arrays, because eager steps receive the arrays of `train_on_batch` unchanged.
    kinds = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, np.ndarray)
    leaves = [leaf for leaf in keras.tree.flatten(data) if isinstance(leaf, kinds)]
    return next((_rows(leaf) for leaf in leaves if tf.TensorShape(leaf.shape).rank != 0), None)


def _rows(batch: Any) -> tf.Tensor:
    if isinstance(batch, tf.RaggedTensor):
        return batch.nrows(tf.int32)
    if isinstance(batch, np.ndarray):
        return tf.constant(len(batch))
    # `tf.shape` accepts sparse tensors, too.
    return tf.shape(batch)[0]


@keras.saving.register_keras_serializable("tfposeidon")
def equal(data: Any) -> Any:
    """Returns 1 for every batch, for losses that are sums.

    The exchange then averages the gradients of these sums over ranks.

    Args:
      data: Batch, the argument of a train step.

    Returns:
      Scalar float32.

    >>> float(equal(None))
    1.0
    """
    return tf.ones([])


@keras.saving.register_keras_serializable("tfposeidon")
def weights(data: Any) -> Any:
    """Sums `sample_weight`, for losses with `reduction="mean_with_sample_weight"`.

    Args:
      data: Batch `(x, y, sample_weight)`, with a single tensor of weights.

    Returns:
      Scalar float32.

    Raises:
      ValueError: If there is no `sample_weight`, or more than one tensor of weights.

    >>> import tensorflow as tf
    >>> float(weights((tf.zeros([2, 3]), tf.zeros([2]), tf.constant([1.0, 0.5]))))
    1.5
    """
    _, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if sample_weight is None:
        raise ValueError(
            "`sample_count=weights` requires batches (x, y, sample_weight). Received: a batch "
            "without sample_weight. Pass sample_weight to fit, or leave `sample_count` out."
        )
    return tf.reduce_sum(tf.cast(_single(sample_weight, "sample_weight"), tf.float32))


@dataclass(frozen=True, kw_only=True)
class Unmasked(Configured):
    """Function that counts tokens other than padding, for losses that are means over tokens.

    Keras's losses are such means if an `Embedding(mask_zero=True)` masks the model's output (count
    the tokens of `x`), or with `SparseCategoricalCrossentropy(ignore_class=...)` (count the tokens
    of `y`).

    Args:
      padding: Token that is masked (default 0).
      of: Part of the batch that contains the tokens, "x" or "y" (default).

    Raises:
      ValueError: If `of` is neither "x" nor "y".

    >>> import tensorflow as tf
    >>> data = (tf.constant([[5, 6, 0, 0], [7, 0, 0, 0]]), tf.constant([1, 0]))
    >>> float(Unmasked(of="x")(data))
    3.0
    """

    padding: int = 0
    of: str = "y"

    def __post_init__(self) -> None:
        if self.of not in ("x", "y"):
            raise ValueError(f'`of` must be "x" or "y". Received: of={self.of!r}. Use "y".')

    def __call__(self, data: Any) -> tf.Tensor:
        """Counts the tokens of a batch.

        Args:
          data: Batch `(x, y, sample_weight)` or a part of it, with the tokens in a single tensor.

        Returns:
          Scalar float32.

        Raises:
          ValueError: If there are several tensors of tokens.
        """
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        tokens = _single(x if self.of == "x" else y, self.of)
        is_token = tf.not_equal(tokens, tf.cast(self.padding, tokens.dtype))
        return tf.reduce_sum(tf.cast(is_token, tf.float32))


def _single(tensors: Any, name: str) -> tf.Tensor:
    leaves = keras.tree.flatten(tensors)
    if len(leaves) != 1:
        raise ValueError(
            f"{name!r} must be a single tensor, so that its samples can be counted. Received: "
            f"{len(leaves)} tensors. Pass a custom sample_count, a function of the data that "
            "train_step receives."
        )
    (tensor,) = leaves
    if isinstance(tensor, tf.RaggedTensor):
        # Count all values, because the rows of a ragged tensor have no padding.
        return tensor.flat_values
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.to_dense(tensor)
    return tf.convert_to_tensor(tensor)
