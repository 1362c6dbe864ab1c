"""Emulates an accelerator for scaling studies: layers of Keras models wait instead of computing.

Parameters have their real shapes and gradients are exchanged, but forward and backward passes only
wait (`Stream`). Gradients of convolutions and vectors are slices of a buffer of random values.
Dense layers multiply factors, as Keras's dense layers do, so that the optimizer can find sufficient
factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon import checks
from tfposeidon.lab.architectures import Layer, Model, Stream, gradient_values

ALIGNED = 16
"""Slices of the buffer begin at multiples of this length, so that TensorFlow does not copy them."""


class Accelerator:
    """Accelerator that the layers of a model share: a stream, and a buffer of gradient values.

    `length` is the size of the largest gradient or factor that is sliced from the buffer. Each
    backward pass takes its values from a different offset. Each rank should have its own `seed`.
    """

    def __init__(self, length: int, stream: Stream, seed: int) -> None:
        self.stream = stream
        self._generator = np.random.default_rng(seed)
        self._spare = max(ALIGNED, length // 8)
        values = gradient_values(length + self._spare, self._generator)
        self._pool = tf.Variable(values, trainable=False, name="gradient_values")

    def work(
        self, token: tf.Tensor, seconds: float, *, first: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Emulates compute time; returns the new token, and an offset for `values`."""

        # Pass the token through, because it orders the layers. `first` marks the start of a step.
        def run(value: np.ndarray) -> tuple[np.ndarray, np.int64]:
            if first:
                self.stream.begin()
            self.stream.run(seconds)
            return value, np.int64(self._generator.integers(self._spare // ALIGNED) * ALIGNED)

        # Use `tf.numpy_function`, because only Python code can wait without occupying a core. The
        # op is stateful, so TensorFlow neither merges nor prunes calls.
        passed, offset = tf.numpy_function(run, [token], [token.dtype, tf.int64])
        return tf.ensure_shape(passed, token.shape), tf.ensure_shape(offset, [])

    def values(self, shape: tuple[int, ...], offset: tf.Tensor) -> tf.Tensor:
        """Returns float32 values of this shape from the buffer at an int64 offset from `work`."""
        return tf.reshape(tf.slice(self._pool.read_value(), [offset], [math.prod(shape)]), shape)


class EmulatedLayer(keras.layers.Layer):
    """Identity layer with real parameters, whose two passes take the seconds in `times`.

    `first` marks the first layer of a model, which starts a step.
    """

    def __init__(
        self, layer: Layer, times: Sequence[float], accelerator: Accelerator, *, first: bool
    ) -> None:
        super().__init__(name=layer.name.replace("/", "_"))
        self._layer, self._first, self._accelerator = layer, first, accelerator
        self._forward_s, self._backward_s = times

    @override
    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.add_weight(shape=self._layer.kernel, initializer="zeros", name="kernel")
        for index, length in enumerate(self._layer.vectors):
            self.add_weight(shape=(length,), initializer="zeros", name=f"vector_{index}")

    @override
    def call(self, token: tf.Tensor) -> tf.Tensor:
        # Pass the parameters as arguments, because only arguments get custom gradients.
        @tf.custom_gradient
        def work(token: tf.Tensor, *parameters: tf.Tensor) -> Any:
            passed, _ = self._accelerator.work(token, self._forward_s, first=self._first)

            def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
                back, offset = self._accelerator.work(upstream, self._backward_s)
                kernel = self._kernel_gradient(token.shape[0], offset)
                vectors = (self._accelerator.values((n,), offset) for n in self._layer.vectors)
                return [back, kernel, *vectors]

            return passed, backward

        return work(token, *map(keras.ops.convert_to_tensor, self.weights))

    @override
    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def _kernel_gradient(self, batch: int, offset: tf.Tensor) -> tf.Tensor:
        rows = batch * self._layer.rows
        if not rows:
            return self._accelerator.values(self._layer.kernel, offset)
        # Compute a real product, because the exchange reads the factors from the op's inputs.
        factors = (self._accelerator.values((rows, n), offset) for n in self._layer.kernel)
        return tf.matmul(*factors, transpose_a=True)


def emulated_model(
    model: Model, *, dilation: float = 1.0, seed: int = 0, stream: Stream | None = None
) -> keras.Model:
    """Returns a Keras model with the parameters and the timing of `model`.

    Input and output are `[batch, 1]`, and any data and loss are suitable. Embeddings have dense
    gradients, as in models whose logits share the embedding. `dilation` multiplies all times: use
    it on a machine that is too slow, with links that are slower by the same factor. Each rank
    should have its own `seed`.

    >>> from tfposeidon.lab import architectures
    >>> vgg19 = emulated_model(architectures.VGG19.shrunk(16), dilation=0.1)
    >>> vgg19.input_shape, vgg19.count_params()
    ((2, 1), 562034)
    """
    checks.check_number("dilation", dilation, checks.POSITIVE, "Use 1 for the papers' times.")
    accelerator = Accelerator(model.largest, stream or Stream(), seed)
    value = inputs = keras.Input((1,), batch_size=model.batch)
    for layer, times in zip(model.layers, model.times(), strict=True):
        dilated = [dilation * seconds for seconds in times]
        value = EmulatedLayer(layer, dilated, accelerator, first=value is inputs)(value)
    return keras.Model(inputs, value, name=model.name.replace("/", "_by_"))
