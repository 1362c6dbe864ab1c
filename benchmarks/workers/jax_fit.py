"""Measures Keras on JAX with `keras.distribution.DataParallel`, over JAX's Gloo.

It runs in a separate environment, with Keras and JAX and without TensorFlow (`harness.JAX`). The
model has the shapes, times and values of the emulated one. An all-reduce after the backward pass of
each layer computes the mean of its gradients, as XLA does.

XLA's compiler for CPUs merges all gradients of a step into one all-reduce after the backward pass,
while its compiler for GPUs merges at most 30 MB. The benchmark emulates a cluster of GPUs, so
merging is disabled: an all-reduce per gradient overlaps with the backward pass, and is faster here.
"""

import math
import os
from functools import partial

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_disable_hlo_passes=cpu-all-reduce-combiner")

import jax
import keras
import numpy as np
from jax.experimental import io_callback, multihost_utils
from jax.sharding import PartitionSpec
from typing_extensions import override

from benchmarks.workers.task import Task
from tfposeidon.lab.architectures import Stream, gradient_values

SYSTEM = "jax"
BATCH = "batch"
"""Name of the mesh axis over which `DataParallel` splits the batch."""
SPREAD_OVER = 8


def main():
    task = Task.from_argument()
    if task.systems != [SYSTEM]:
        raise ValueError(f'`systems` must be ["{SYSTEM}"]. Received: {task.systems}')
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    keras.distribution.initialize(task.address(0), task.size, task.rank)
    distribution = keras.distribution.DataParallel()
    keras.distribution.set_distribution(distribution)
    model = emulated_model(task, distribution.device_mesh.backend_mesh)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    data = np.ones((task.emulated().batch, 1), "float32")

    def step():
        model.train_on_batch(data, data)
        # The loss is ready before the update, so wait for the variables.
        jax.block_until_ready([variable.value for variable in model.trainable_variables])

    task.measure(SYSTEM, step, everybody)


def everybody(seconds):
    """Returns the seconds of each rank, for `Task.measure`."""
    return multihost_utils.process_allgather(np.float32(seconds)).tolist()


def emulated_model(task, mesh):
    """Returns a Keras model with the parameters and the timing of the task's model.

    Args:
      task: The job's `Task`.
      mesh: Devices of all processes, with one axis.
    """
    model, accelerator = task.emulated(), Accelerator(task, mesh)
    value = inputs = keras.Input((1,), batch_size=model.batch * task.size)
    for index, (layer, times) in enumerate(zip(model.layers, model.times(), strict=True)):
        forward_s, backward_s = (task.dilation * seconds for seconds in times)
        value = EmulatedLayer(layer, forward_s, backward_s, accelerator, first=index == 0)(value)
    return keras.Model(inputs, value)


class Accelerator:
    """Accelerator of this process: a stream, and a pool of gradient values.

    Args:
      task: The job's `Task`.
      mesh: Devices of all processes, with one axis.
    """

    def __init__(self, task, mesh):
        self.mesh, self.batch = mesh, task.emulated().batch
        self.stream = Stream()
        self._generator = np.random.default_rng(task.rank)
        length = task.emulated().largest
        self._spare = max(1, length // SPREAD_OVER)
        # Keras replicates the pool, so processes start at different indices. A constant would be
        # copied into each program.
        values = gradient_values(length + self._spare, np.random.default_rng(0))
        self.pool = keras.Variable(values, trainable=False, name="gradient_values")

    def run(self, seconds, first, token):
        """Waits for the time of some work; XLA calls this once on each process.

        Args:
          seconds: Seconds that the accelerator works.
          first: True for the work with which a step begins.
          token: Part of a tensor, which is passed on.

        Returns:
          The token, and an offset in the pool.
        """
        if first:
            self.stream.begin()
        self.stream.run(seconds)
        return token, np.array([self._generator.integers(self._spare)], np.int32)

    def work(self, token, seconds, *, first=False):
        """Makes a program wait for the time of some work, after `token` is computed."""
        shapes = jax.ShapeDtypeStruct(token.shape, token.dtype), jax.ShapeDtypeStruct((1,), "int32")
        return io_callback(partial(self.run, seconds, first), shapes, token)


class EmulatedLayer(keras.layers.Layer):
    """Layer with real parameters that waits for its compute time, and then returns gradients.

    Args:
      layer: Shapes of the parameters.
      forward_s: Seconds of the forward pass.
      backward_s: Seconds of the backward pass.
      accelerator: Accelerator on which the layer runs.
      first: True for the first layer of a model.
    """

    def __init__(self, layer, forward_s, backward_s, accelerator, first):
        super().__init__(name=layer.name.replace("/", "_"))
        self.layer, self.forward_s, self.backward_s = layer, forward_s, backward_s
        self.first, self._accelerator = first, accelerator

    @override
    def build(self, input_shape):
        shapes = [self.layer.kernel, *((length,) for length in self.layer.vectors)]
        self.parameters = [self.add_weight(shape=shape, initializer="zeros") for shape in shapes]

    @override
    def compute_output_shape(self, input_shape):
        return input_shape

    @override
    def call(self, token):
        accelerator = self._accelerator
        by_process = partial(jax.shard_map, mesh=accelerator.mesh, check_vma=False)
        cut, whole = PartitionSpec(BATCH), PartitionSpec()

        @jax.custom_vjp
        def work(token, pool, *parameters):
            @partial(by_process, in_specs=cut, out_specs=cut)
            def forward(token):
                return accelerator.work(token, self.forward_s, first=self.first)[0]

            return forward(token)

        def forward(token, pool, *parameters):
            return work(token, pool, *parameters), pool

        def backward(pool, upstream):
            outputs = (cut, *[whole] * len(self.parameters))

            @partial(by_process, in_specs=(cut, whole), out_specs=outputs)
            def own(upstream, pool):
                back, offset = accelerator.work(upstream, self.backward_s)
                gradients = self._gradients(pool, offset[0])
                return back, *(jax.lax.pmean(gradient, BATCH) for gradient in gradients)

            back, *gradients = own(upstream, pool)
            # The gradient of the pool is not used.
            return back, jax.numpy.zeros_like(pool), *gradients

        work.defvjp(forward, backward)
        return work(token, accelerator.pool.value, *(p.value for p in self.parameters))

    def _gradients(self, pool, offset):
        def values(shape):
            return jax.lax.dynamic_slice(pool, [offset], [math.prod(shape)]).reshape(shape)

        if not self.layer.rows:
            kernel = values(self.layer.kernel)
        else:
            rows = self._accelerator.batch * self.layer.rows
            left, right = (values((rows, width)) for width in self.layer.kernel)
            kernel = left.T @ right
        return [kernel, *(values((length,)) for length in self.layer.vectors)]


if __name__ == "__main__":
    main()
