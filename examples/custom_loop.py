"""Trains with a custom training loop instead of `fit`, on any number of ranks.

horovodrun -np 2 python examples/custom_loop.py --epochs 12
"""

import argparse
import sys

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfposeidon as tp


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training samples")
    parser.add_argument("--global-batch", type=int, default=64, help="samples per step, all ranks")
    parser.add_argument("--scheme", default="auto", help="name of a communication scheme")
    parser.add_argument(
        "--goal", type=float, default=0.95, help="test accuracy below which the job fails"
    )
    return parser.parse_args()


def load_data(global_batch):
    """Returns this rank's share of the training data, in batches, and of the test data."""
    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)
    images = (digits.images[order, ..., np.newaxis] / 16).astype("float32")
    labels = digits.target[order]
    share = slice(tp.rank(), None, tp.size())
    train, test = (images[300:], labels[300:]), (images[:300], labels[:300])
    mine = tf.data.Dataset.from_tensor_slices((train[0][share], train[1][share]))
    # All ranks must take the same number of steps in a custom loop, so drop remaining samples.
    mine = mine.shuffle(2000).batch(global_batch // tp.size(), drop_remainder=True)
    steps = len(train[0]) // tp.size() // (global_batch // tp.size())
    return mine.take(steps).prefetch(2), (test[0][share], test[1][share])


def build_model():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def accuracy_of(model, images, labels):
    """Returns the accuracy over the samples of all ranks; each rank passes its own share."""
    hits = tf.argmax(model(images), axis=1) == labels
    right = tp.all_reduce(tf.reduce_sum(tf.cast(hits, tf.float32)), op="sum", name="right")
    return float(right / tp.all_reduce(tf.cast(len(labels), tf.float32), op="sum", name="all"))


def main():
    options = parse_arguments()
    tp.init()
    if tp.size() > (batch := options.global_batch):
        sys.exit(f"--global-batch must be {tp.size()} (number of ranks) or more. Received: {batch}")
    keras.utils.set_random_seed(tp.rank())
    data, test = load_data(options.global_batch)
    model = build_model()
    optimizer = tp.DistributedOptimizer(keras.optimizers.Adam(2e-3), scheme=options.scheme)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # A custom loop must broadcast the weights of rank 0; `fit` does so by itself.
    optimizer.build(model.trainable_variables)
    tp.broadcast_variables([*model.variables, *optimizer.variables])

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables, sample_count=tf.shape(images)[0])
        return loss

    for epoch in range(options.epochs):
        losses = [step(images, labels) for images, labels in data]
        mean = tp.all_reduce(tf.reduce_mean(losses), name="loss")
        if tp.rank() == 0:
            print(f"epoch {epoch + 1}: loss {float(mean):.3f}")
    accuracy = accuracy_of(model, *test)
    if tp.rank() == 0:
        print(f"\n{optimizer.plan}\n\ntest accuracy: {100 * accuracy:.2f} %")
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
