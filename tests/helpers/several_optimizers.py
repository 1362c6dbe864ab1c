"""A GAN with two optimizers, its data and its state."""

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from tfposeidon.training.session import optimizers_of

ADAM = keras.optimizers.Adam


class Gan(keras.Model):
    """The GAN of keras.io, with the noise in the data, so that it is reproducible."""

    def __init__(self, d_steps=1):
        super().__init__()
        self.d_steps = d_steps
        layer = keras.layers.Dense
        self.generator = keras.Sequential(
            [keras.Input((3,)), layer(8, activation="relu"), layer(4)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((4,)), layer(8, activation="relu"), layer(1)]
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer
        self.optimizers = {"generator": g_optimizer}

    def train_step(self, data):
        noise, real = data
        for _ in range(self.d_steps):
            with tf.GradientTape() as tape:
                fakes, reals = self.discriminator(self.generator(noise)), self.discriminator(real)
                d_loss = self.loss_fn(tf.ones_like(fakes), fakes) + self.loss_fn(
                    tf.zeros_like(reals), reals
                )
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(
                zip(tape.gradient(d_loss, weights), weights, strict=True)
            )
        with tf.GradientTape() as tape:
            fakes = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros_like(fakes), fakes)
        weights = self.generator.trainable_weights
        self.optimizers["generator"].apply_gradients(
            zip(tape.gradient(g_loss, weights), weights, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


def gan_data(count):
    random = np.random.default_rng(3)
    return random.normal(size=(count, 3)).astype("float32"), random.normal(2, 1, (count, 4)).astype(
        "float32"
    )


def gan_batches(pieces):
    """Returns a dataset of unknown length with batches of these sizes, in the order of the data."""
    noise, real = gan_data(sum(pieces))
    ends = np.cumsum(pieces)

    def batches():
        for end, size in zip(ends, pieces, strict=True):
            yield noise[end - size : end], real[end - size : end]

    shapes = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 4])
    return tf.data.Dataset.from_generator(batches, output_signature=shapes)


def make_gan(wrap, d_steps=1, scheme="allreduce"):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(11)
    model = Gan(d_steps)
    optimizers = ADAM(0.01), ADAM(0.02)
    model.compile(*(tp.DistributedOptimizer(o, scheme) for o in optimizers) if wrap else optimizers)
    return model


def gan_state(model):
    return [
        v.numpy()
        for v in (*model.variables, *(v for o in optimizers_of(model) for v in o.variables))
    ]
