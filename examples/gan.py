"""Trains a GAN with two optimizers and a custom train step, to generate 8 x 8 digits.

horovodrun -np 2 python examples/gan.py --images digits.png
"""

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfposeidon as tp

NOISE, BATCH = 32, 64


class Gan(keras.Model):
    """Generator and discriminator, each with its own optimizer."""

    def __init__(self):
        super().__init__()
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        layers = keras.layers
        self.generator = keras.Sequential(
            [
                keras.Input((NOISE,)),
                layers.Dense(128, activation="leaky_relu"),
                layers.Dense(256, activation="leaky_relu"),
                layers.Dense(64, activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(256, activation="leaky_relu"),
                layers.Dense(128, activation="leaky_relu"),
                layers.Dense(1),
            ]
        )

    def compile(self, d_optimizer, g_optimizer):
        """Stores the optimizers of both networks; each is a `DistributedOptimizer`."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, real):
        """Trains the discriminator on real and generated images, then the generator."""
        noise, loss = tf.random.normal([tf.shape(real)[0], NOISE]), self.cross_entropy
        with tf.GradientTape() as tape:
            reals, fakes = self.discriminator(real), self.discriminator(self.generator(noise))
            # One-sided label smoothing, so that the discriminator does not become overconfident.
            d_loss = loss(0.9 * tf.ones_like(reals), reals) + loss(tf.zeros_like(fakes), fakes)
        weights = self.discriminator.trainable_variables
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            fakes = self.discriminator(self.generator(noise))
            g_loss = loss(tf.ones_like(fakes), fakes)
        weights = self.generator.trainable_variables
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training samples")
    parser.add_argument("--images", type=Path, help="PNG file for 64 generated digits")
    parser.add_argument("--goal", type=float, default=0.1, help="maximum distance of mean images")
    options = parser.parse_args()
    tp.init()
    if tp.size() > BATCH:
        sys.exit(f"At most {BATCH} ranks are supported. Received: {tp.size()} ranks. Use fewer")
    keras.utils.set_random_seed(tp.rank())
    images = (load_digits().data / 8 - 1).astype("float32")
    gan = Gan()
    optimizers = [tp.DistributedOptimizer(keras.optimizers.Adam(5e-4, 0.5)) for _ in range(2)]
    gan.compile(*optimizers)
    mine = images[tp.rank() :: tp.size()]
    gan.fit(mine, batch_size=BATCH // tp.size(), epochs=options.epochs)
    # All ranks generate the same digits, because they have the same weights and seed.
    drawn = gan.generator(tf.random.stateless_normal([1024, NOISE], [1, 2])).numpy()
    distance = float(np.abs(drawn.mean(axis=0) - images.mean(axis=0)).mean())
    if tp.rank() == 0:
        print(f"\n{gan.g_optimizer.plan}\n\ndistance of the mean images: {distance:.3f}")
        if options.images:
            tiles = drawn[:64].reshape(8, 8, 8, 8).swapaxes(1, 2).reshape(64, 64, 1)
            pixels = tf.image.resize((tiles + 1) * 127.5, [512, 512], "nearest")
            options.images.write_bytes(tf.io.encode_png(tf.cast(pixels, tf.uint8)).numpy())
    return 0 if distance <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
