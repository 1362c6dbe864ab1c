"""An emulated accelerator for scaling studies: Keras models whose layers take time, not the processor.

Parameters have their real shapes and travel for real; forward and backward only wait (`Stream`).
Gradients of convolutions and vectors are cut from a pool of values, Dense layers multiply real factors, as
Keras's own do, so that sufficient factors can be found.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon import ranges
from tfposeidon.lab import models
from tfposeidon.lab.stream import Stream
from tfposeidon.lab.values import gradient_values

ALIGNED = 16
"""Elements: slices of the pool that start at a multiple of this are not copied."""


class Accelerator:
    """What the layers of one model share: a stream, and a pool of gradient values.

    Each backward pass takes them from another place of the pool.

    Args:
      length: Values in the pool: those of the largest gradient that is cut from it, and some more.
      stream: Where the layers' time goes by.
      seed: Of the values; give each rank its own.
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
        """Waits once `token` is there.

        Returns:
          The token, and the place in the pool from which this piece of work takes values.
        """

        def run(value: np.ndarray) -> tuple[np.ndarray, np.int64]:
            if first:
                self.stream.begin()
            self.stream.run(seconds)
            return value, np.int64(self._generator.integers(self._spare // ALIGNED) * ALIGNED)

        passed, place = tf.numpy_function(run, [token], [token.dtype, tf.int64])
        return tf.ensure_shape(passed, token.shape), tf.ensure_shape(place, [])

    def values(self, shape: tuple[int, ...], place: tf.Tensor) -> tf.Tensor:
        """Values of that shape from that place."""
        return tf.reshape(tf.slice(self._pool.read_value(), [place], [math.prod(shape)]), shape)


class EmulatedLayer(keras.layers.Layer):
    """A layer with real parameters that takes its time forward and backward; its value is its input.

    Args:
      layer: Shapes of its parameters.
      forward_s, backward_s: Seconds.
      accelerator: Where it works.
      first: True for the first layer of a model, with which a step begins.
    """

    def __init__(
        self,
        layer: models.Layer,
        forward_s: float,
        backward_s: float,
        accelerator: Accelerator,
        *,
        first: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(name=layer.name.replace("/", "_"), **options)
        self.layer, self.forward_s, self.backward_s, self.first = (
            layer,
            forward_s,
            backward_s,
            first,
        )
        self._accelerator = accelerator

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.parameters = [
            self.add_weight(shape=self.layer.kernel, initializer="zeros", name="kernel")
        ]
        for number, length in enumerate(self.layer.vectors):
            self.parameters.append(
                self.add_weight(shape=(length,), initializer="zeros", name=f"vector_{number}")
            )

    def call(self, token: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def work(token: tf.Tensor, *parameters: tf.Tensor) -> Any:
            passed, _ = self._accelerator.work(token, self.forward_s, first=self.first)

            def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
                back, place = self._accelerator.work(upstream, self.backward_s)
                kernel = self._kernel_gradient(token.shape[0], place)
                return [
                    back,
                    kernel,
                    *(self._accelerator.values((n,), place) for n in self.layer.vectors),
                ]

            return passed, backward

        return work(
            token, *(keras.ops.convert_to_tensor(parameter) for parameter in self.parameters)
        )

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def _kernel_gradient(self, batch: int, place: tf.Tensor) -> tf.Tensor:
        if self.layer.kind != "dense":
            return self._accelerator.values(self.layer.kernel, place)
        rows = batch * self.layer.rows
        inputs, outputs = (
            self._accelerator.values((rows, width), place) for width in self.layer.kernel
        )
        return tf.matmul(inputs, outputs, transpose_a=True)


def emulated_model(
    model: models.Model, *, dilation: float = 1.0, seed: int = 0, stream: Stream | None = None
) -> keras.Model:
    """A Keras model with the parameters and the timing of `model`.

    It takes and gives `[batch, 1]`; any data and any loss will do. Embeddings have dense gradients, as they
    have where the logits share them.

    Args:
      model: From `models.model(name)`, shrunk if need be.
      dilation: Factor on all times: with links slower by the same factor, a slow machine can follow.
      seed: Of the gradients' values; give each rank its own.
      stream: Where its time goes by; one of its own by default.

    Raises:
      ValueError: If `dilation` is not positive.
    """
    ranges.check_number("dilation", dilation, ranges.POSITIVE, "Use 1 for the papers' times.")
    accelerator = Accelerator(_pool_length(model), stream or Stream(), seed)
    value = inputs = keras.Input((1,), batch_size=model.batch)
    for number, (layer, (forward_s, backward_s)) in enumerate(
        zip(model.layers, model.times(), strict=True)
    ):
        times = (dilation * forward_s, dilation * backward_s)
        value = EmulatedLayer(layer, *times, accelerator, first=number == 0)(value)
    return keras.Model(inputs, value, name=model.name.replace("/", "_by_"))


def _pool_length(model: models.Model) -> int:
    cut = [math.prod(layer.kernel) for layer in model.layers if layer.kind != "dense"]
    factors = [
        model.batch * layer.rows * max(layer.kernel)
        for layer in model.layers
        if layer.kind == "dense"
    ]
    return max([*cut, *factors, *(length for layer in model.layers for length in layer.vectors)])
