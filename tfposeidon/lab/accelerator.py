"""An emulated accelerator for scaling studies: Keras models whose layers take time, not the CPU.

Parameters have their real shapes and are really exchanged; forward and backward passes only wait
(`Stream`). Gradients of convolutions and vectors are slices of a pool of values; dense layers
multiply real factors, as those of Keras do, so that sufficient factors can be found.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon import ranges
from tfposeidon.lab import models
from tfposeidon.lab.architectures import Layer
from tfposeidon.lab.stream import Stream, gradient_values

ALIGNED = 16
"""Elements at multiples of which slices of the pool begin: TensorFlow does not copy those."""


class Accelerator:
    """Accelerator that the layers of a model share: a stream, and a pool of gradient values.

    Each backward pass takes its values from another offset of the pool.

    Args:
      length: Number of values of the largest gradient that is cut from the pool.
      stream: Stream in which the time of the layers passes.
      seed: Seed of the values; give each rank its own.
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
        """Works for some time, once `token` has been computed.

        Args:
          token: Any tensor. That it is passed on keeps the layers in order.
          seconds: Seconds that the accelerator works.
          first: True for the work with which a step begins.

        Returns:
          The token, and the offset in the pool from which this piece of work takes values.
        """

        def run(value: np.ndarray) -> tuple[np.ndarray, np.int64]:
            if first:
                self.stream.begin()
            self.stream.run(seconds)
            return value, np.int64(self._generator.integers(self._spare // ALIGNED) * ALIGNED)

        # A NumPy function, because only Python can wait without holding a core. It is stateful, so
        # that TensorFlow neither merges equal calls nor leaves one out.
        passed, offset = tf.numpy_function(run, [token], [token.dtype, tf.int64])
        return tf.ensure_shape(passed, token.shape), tf.ensure_shape(offset, [])

    def values(self, shape: tuple[int, ...], offset: tf.Tensor) -> tf.Tensor:
        """Returns values of the pool.

        Args:
          shape: Shape of the tensor.
          offset: Offset in the pool, a scalar int64 from `work`.

        Returns:
          float32 of that shape.
        """
        return tf.reshape(tf.slice(self._pool.read_value(), [offset], [math.prod(shape)]), shape)


class EmulatedLayer(keras.layers.Layer):
    """Layer with real parameters that takes its time forward and backward, and returns its input.

    Args:
      layer: Shapes of its parameters.
      forward_s: Seconds of its forward pass.
      backward_s: Seconds of its backward pass.
      accelerator: Accelerator on which it works.
      first: True for the first layer of a model, with which a step begins.
      **options: Options of `keras.layers.Layer`.
    """

    def __init__(
        self,
        layer: Layer,
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

    @override
    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.parameters = [
            self.add_weight(shape=self.layer.kernel, initializer="zeros", name="kernel")
        ]
        for index, length in enumerate(self.layer.vectors):
            self.parameters.append(
                self.add_weight(shape=(length,), initializer="zeros", name=f"vector_{index}")
            )

    @override
    def call(self, token: tf.Tensor) -> tf.Tensor:
        # The parameters are arguments, as gradients are returned for arguments alone.
        @tf.custom_gradient
        def work(token: tf.Tensor, *parameters: tf.Tensor) -> Any:
            passed, _ = self._accelerator.work(token, self.forward_s, first=self.first)

            def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
                back, offset = self._accelerator.work(upstream, self.backward_s)
                kernel = self._kernel_gradient(token.shape[0], offset)
                return [
                    back,
                    kernel,
                    *(self._accelerator.values((n,), offset) for n in self.layer.vectors),
                ]

            return passed, backward

        return work(
            token, *(keras.ops.convert_to_tensor(parameter) for parameter in self.parameters)
        )

    @override
    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def _kernel_gradient(self, batch: int, offset: tf.Tensor) -> tf.Tensor:
        if self.layer.kind != "dense":
            return self._accelerator.values(self.layer.kernel, offset)
        # A real product, as the exchange reads factors off the op that multiplies them.
        rows = batch * self.layer.rows
        inputs, outputs = (
            self._accelerator.values((rows, width), offset) for width in self.layer.kernel
        )
        return tf.matmul(inputs, outputs, transpose_a=True)


def emulated_model(
    model: models.Model, *, dilation: float = 1.0, seed: int = 0, stream: Stream | None = None
) -> keras.Model:
    """Returns a Keras model with the parameters and the timing of `model`.

    Its input and output are `[batch, 1]`; any data and any loss will do. Embeddings have dense
    gradients, as they have where the logits share them.

    >>> from tfposeidon.lab import models
    >>> resnet = emulated_model(models.model("resnet50").shrunk(16), dilation=0.1)
    >>> resnet.input_shape, resnet.count_params()
    ((16, 1), 103490)

    Args:
      model: Model from `models.model(name)`, shrunk if need be.
      dilation: Factor on all times: with links slower by the same factor, a slow machine can
        follow.
      seed: Seed of the gradients' values; give each rank its own.
      stream: Stream in which its time passes; a stream of its own by default.

    Raises:
      ValueError: If `dilation` is not positive.
    """
    ranges.check_number("dilation", dilation, ranges.POSITIVE, "Use 1 for the papers' times.")
    accelerator = Accelerator(_pool_length(model), stream or Stream(), seed)
    value = inputs = keras.Input((1,), batch_size=model.batch)
    for index, (layer, (forward_s, backward_s)) in enumerate(
        zip(model.layers, model.times(), strict=True)
    ):
        times = (dilation * forward_s, dilation * backward_s)
        value = EmulatedLayer(layer, *times, accelerator, first=index == 0)(value)
    return keras.Model(inputs, value, name=model.name.replace("/", "_by_"))


def _pool_length(model: models.Model) -> int:
    """Returns the number of values of the largest gradient or factor."""
    gradients = [math.prod(layer.kernel) for layer in model.layers if layer.kind != "dense"]
    factors = [
        model.batch * layer.rows * max(layer.kernel)
        for layer in model.layers
        if layer.kind == "dense"
    ]
    return max(
        [*gradients, *factors, *(length for layer in model.layers for length in layer.vectors)]
    )
