"""Times steps of a Transformer and of ResNet-50: Keras with and without XLA, and tfposeidon."""

import os
import time

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from benchmarks.gpu_stages.training import LOSS


def transformer(small):
    """Returns a model of about 25 million weights, and a batch of 64."""
    width, depth, words, length, batch = (32, 1, 100, 16, 2) if small else (512, 6, 8000, 128, 64)
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(words, width)(tokens)
    for _ in range(depth):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(8, width // 8)(normed, normed)
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(width)(keras.layers.Dense(4 * width, "gelu")(normed))
    logits = keras.layers.Dense(words)(keras.layers.LayerNormalization()(x))
    drawn = np.random.default_rng(0).integers(0, words, (2, batch, length))
    return keras.Model(tokens, logits), tuple(drawn)


def resnet50(small):
    """Returns ResNet-50 and a batch of 64 images of 224 pixels."""
    side, batch = (32, 2) if small else (224, 64)
    model = keras.applications.ResNet50(
        weights=None, input_shape=(side, side, 3), classifier_activation=None
    )
    draw = np.random.default_rng(0)
    images = draw.normal(size=(batch, side, side, 3)).astype("float32")
    return model, (images, draw.integers(0, 1000, batch))


class Clock(keras.callbacks.Callback):
    """Records the seconds of each epoch; logs are numbers, so the device has finished by then."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        """Records the start of the epoch."""
        self.begin_s = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epoch's seconds."""
        self.seconds.append(time.perf_counter() - self.begin_s)


def speed(checks):
    """Times a step on one rank, which shows the overhead without communication."""
    tp.init()
    models = {"transformer": transformer, "resnet50": resnet50}
    names, policies = (
        ("transformer", "float32")
        if checks.small
        else ("transformer resnet50", "float32 mixed_float16")
    )
    for policy in os.environ.get("POLICIES", policies).split():
        for name in os.environ.get("MODELS", names).split():
            times = {}
            for xla in (False,) if checks.small else (False, True):
                for wrapped in (False, True):
                    label = f"{'tfposeidon' if wrapped else 'keras'}{'.xla' if xla else ''}"
                    timed = (models[name], policy, wrapped, xla, times)
                    checks(f"{name}.{policy}.{label}", _step, checks.small, *timed)


def _step(say, small, build, policy, wrapped, xla, times):
    keras.utils.clear_session()
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)
    try:
        model, batch = build(small)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(
            tp.DistributedOptimizer(optimizer) if wrapped else optimizer, LOSS, jit_compile=xla
        )
        data = tf.data.Dataset.from_tensors(batch).repeat().prefetch(2)
        clock, steps = Clock(), 2 if small else 20
        model.fit(data, steps_per_epoch=3, verbose=0, callbacks=[clock])
        model.fit(data, steps_per_epoch=steps, epochs=4, verbose=0, callbacks=[clock])
    finally:
        keras.config.set_dtype_policy("float32")
    # The first `fit` traces and compiles; the first epoch of the second `fit` may allocate memory.
    times[wrapped, xla] = ms = 1e3 * min(clock.seconds[2:]) / steps
    plain = times.get((False, xla), ms)
    first_s = clock.seconds[0]
    say(f"{ms:.1f} ms per step, {ms / plain:.2f} of Keras; first three steps {first_s:.1f} s")
