"""The emulated accelerator waits in order without using the CPU, and returns real gradients."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.lab.accelerator import emulated_model
from tfposeidon.lab.architectures import VGG19, Stream


class Clock:
    """Simulated time, which advances when `sleep` is called."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_late_wake_ups_do_not_accumulate():
    clock = Clock()
    stream = Stream(clock, lambda seconds: clock.sleep(seconds + 0.5))
    stream.begin()
    for _ in range(10):
        stream.run(1.0)
    assert clock.now == pytest.approx(100 + 10 + 0.5)


def test_a_step_starts_at_the_current_time():
    clock = Clock()
    stream = Stream(clock, clock.sleep)
    clock.sleep(7)
    stream.begin()
    stream.run(1.0)
    assert clock.now == pytest.approx(108)


class Recorder(Stream):
    """Records the seconds of its work instead of waiting."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def begin(self):
        self.steps.append([])

    def run(self, seconds):
        self.steps[-1].append(seconds)


def small():
    return VGG19.shrunk(16)


def test_a_step_runs_forward_and_backward_through_the_layers():
    stream = Recorder()
    model = emulated_model(small(), dilation=3.0, stream=stream)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
    ones = np.ones((2 * small().batch, 1), "float32")
    model.fit(ones, ones, batch_size=small().batch, verbose=0)
    times = small().times()
    expected = [3 * f for f, _ in times] + [3 * b for _, b in reversed(times)]
    assert stream.steps[-2:] == [pytest.approx(expected)] * 2
    assert sum(expected) == pytest.approx(3 * small().step_s)


def test_parameters_equal_those_of_the_model():
    model = emulated_model(small(), stream=Recorder())
    assert model.count_params() == small().parameters
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    assert shapes == [
        s for layer in small().layers for s in (layer.kernel, *((n,) for n in layer.vectors))
    ]


def _gradients(model):
    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(tf.ones(model.input_shape))))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return gradients


def test_gradients_are_heavy_tailed_and_new_in_every_step():
    gradients = _gradients(emulated_model(small(), stream=Recorder(), seed=1))
    first, second = gradients(), gradients()
    values = np.concatenate(
        [g.numpy().ravel() for g, kind in zip(first, _kinds(), strict=True) if kind != "factors"]
    )
    assert np.isfinite(values).all()
    assert np.abs(values).max() > 8 * values.std()
    assert np.mean(np.abs(values) < values.std() / 2) > 0.5
    assert not np.array_equal(first[2].numpy(), second[2].numpy())
    other = _gradients(emulated_model(small(), stream=Recorder(), seed=2))()
    assert not np.array_equal(first[2].numpy(), other[2].numpy())


def _kinds():
    """Returns the kind of each variable: "kernel", "factors" (of a dense layer) or "vector"."""
    return [
        kind
        for layer in small().layers
        for kind in ("factors" if layer.rows else "kernel", *["vector"] * len(layer.vectors))
    ]


def test_dense_gradients_are_products_of_factors():
    """Readers of sufficient factors must find these products in the graph, as in real models."""
    graph = _gradients(emulated_model(small(), stream=Recorder())).get_concrete_function().graph
    products = [
        op for op in graph.get_operations() if op.type == "MatMul" and op.get_attr("transpose_a")
    ]
    dense = [layer for layer in small().layers if layer.rows]
    assert sorted(tuple(op.outputs[0].shape) for op in products) == sorted(
        layer.kernel for layer in dense
    )
    for op in products:
        assert op.inputs[0].shape[0] == op.inputs[1].shape[0] == small().batch


def test_gradients_appear_after_the_time_of_their_layer():
    """Each gradient waits for its own and all later layers, so that the last is exchanged first."""
    stream = Recorder()
    graph = _gradients(emulated_model(small(), stream=stream)).get_concrete_function().graph
    waits = [op for op in graph.get_operations() if op.type in ("PyFunc", "EagerPyFunc")]
    assert len(waits) == 2 * len(small().layers)
    kernels = [
        output for output, kind in zip(graph.outputs, _kinds(), strict=True) if kind != "vector"
    ]
    counts = [len(_waits_before(kernel.op)) for kernel in kernels]
    layers = len(small().layers)
    assert counts == [layers + layers - number for number in range(layers)]


def _waits_before(op):
    seen, stack = set(), [op]
    while stack:
        found = stack.pop()
        for source in (tensor.op for tensor in found.inputs):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return [op for op in seen if op.type in ("PyFunc", "EagerPyFunc")]


def test_waiting_does_not_use_the_processor():
    model = emulated_model(small(), dilation=0.5 / small().step_s)
    gradients = _gradients(model)
    gradients()
    wall, processor = time.perf_counter(), time.process_time()
    gradients()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert wall >= 0.5
    assert processor < wall / 2


def test_dilation_must_be_positive():
    with pytest.raises(
        ValueError, match=r"`dilation` must be a finite number > 0. Received: dilation=0"
    ):
        emulated_model(small(), dilation=0)
