"""What a batch counts: by how much ranks weigh their gradients.

`fit` takes a loss for a mean over the samples of the batch, and weighs ranks by their `batch_size`. For losses that are
means over something else, `DistributedOptimizer(sample_count=...)` takes one of the others here, or a function of your
own: from what the model's `train_step` is given to a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfposeidon.config import Configured

SampleCount = Callable[[Any], Any]
"""From a batch, as `train_step` is given it, to a scalar; `None` if there is no telling."""


def name(count: SampleCount) -> str:
    """The same on all ranks: of a function, or of the class of what else can be called."""
    return getattr(count, "__name__", type(count).__name__)


def counted(count: SampleCount, data: Any) -> Any:
    """What `count` says of `data`, not before there is a batch: a rank that is out of data must not count.

    Raises:
      ValueError: If it is more than one number.
    """
    number = count(data)
    if number is None:
        return None
    with tf.control_dependencies(_tensors(data)):
        number = tf.identity(number)
    if number.shape.rank != 0:
        raise ValueError(
            f"`sample_count` must give one number for the batch. Received: shape {tuple(number.shape)}. Take its sum."
        )
    return number


def batch_size(data: Any) -> Any:
    """Samples of a batch: for losses that are means over samples.

    Args:
      data: What a train step is given.

    Returns:
      Scalar int32, or `None` if there is no telling.
    """
    leaves = [leaf for leaf in _tensors(data) if leaf.shape.rank != 0]
    return tf.shape(leaves[0])[0] if leaves else None


@keras.saving.register_keras_serializable("tfposeidon")
def equal(data: Any) -> Any:
    """One for every batch: for losses that are sums, whose gradients become the mean over ranks of those of the sums.

    Args:
      data: What a train step is given.

    Returns:
      Scalar float32.
    """
    return tf.ones([])


@keras.saving.register_keras_serializable("tfposeidon")
def weights(data: Any) -> Any:
    """Sum of `sample_weight`: for losses with `reduction="mean_with_sample_weight"`.

    Args:
      data: `(x, y, sample_weight)`.

    Returns:
      Scalar float32.

    Raises:
      ValueError: If there is no `sample_weight`.
    """
    _, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if sample_weight is None:
        raise ValueError(
            "`sample_count=weights` needs batches (x, y, sample_weight). Received: no sample_weight. Give it to fit, "
            "or leave sample_count out."
        )
    return tf.reduce_sum(tf.cast(_single(sample_weight, "sample_weight"), tf.float32))


@dataclass(frozen=True, kw_only=True)
class Unmasked(Configured):
    """Number of tokens that are no padding: for losses that are means over tokens.

    Keras's losses are, where an `Embedding(mask_zero=True)` masks the model's output (count those of `x`), or with
    `SparseCategoricalCrossentropy(ignore_class=...)` (count those of `y`).

    Args:
      padding: What is masked.
      of: Where it is looked for, "x" or "y".

    Raises:
      ValueError: If `of` is neither.

    >>> import tensorflow as tf
    >>> data = (tf.constant([[5, 6, 0, 0], [7, 0, 0, 0]]), tf.constant([1, 0]))
    >>> float(Unmasked(of="x")(data))
    3.0
    """

    padding: int = 0
    of: str = "y"

    def __post_init__(self) -> None:
        if self.of not in ("x", "y"):
            raise ValueError(f'`of` must be "x" or "y". Received: of={self.of!r}')

    def __call__(self, data: Any) -> tf.Tensor:
        """Counts the tokens of `(x, y, sample_weight)` or a part of it; scalar float32."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        tokens = _single({"x": x, "y": y}[self.of], self.of)
        return tf.reduce_sum(
            tf.cast(tf.not_equal(tokens, tf.cast(self.padding, tokens.dtype)), tf.float32)
        )


def _tensors(data: Any) -> list[tf.Tensor]:
    return [leaf for leaf in keras.tree.flatten(data) if isinstance(leaf, tf.Tensor)]


def _single(tensors: Any, name: str) -> tf.Tensor:
    leaves = keras.tree.flatten(tensors)
    if len(leaves) != 1:
        raise ValueError(
            f"Samples are counted in a single tensor. Received: {len(leaves)} as {name!r}. Give a sample_count of your "
            "own, a function of what train_step is given."
        )
    return tf.convert_to_tensor(leaves[0])
