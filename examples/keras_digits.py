"""Trains a small CNN on scikit-learn's handwritten digits, on any number of ranks.

horovodrun -np 2 python examples/keras_digits.py --epochs 12
"""

import argparse
import sys

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_callbacks
import tfposeidon as tp


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--global-batch", type=int, default=64, help="samples per step over all ranks together"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--scheme", default="auto", help="auto, allreduce, alltoall, torus2d, ps")
    parser.add_argument("--ranks-per-node", type=int, help="regroup the ranks into emulated nodes")
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="folder of snapshots, saved after each epoch and resumed from",
    )
    parser.add_argument(
        "--goal", type=float, default=0.97, help="validation accuracy below which the job fails"
    )
    return parser.parse_args()


def load_data():
    """Returns this rank's share of the training data, and all validation data.

    There are 1,797 images of 8 x 8 pixels; a fifth of them is for validation.
    """
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype("float32")
    x, x_val, y, y_val = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    return tp.shard((x, y)), (x_val, y_val)


def build_model():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


def main():
    options = parse_arguments()
    topology = tp.init(ranks_per_node=options.ranks_per_node)
    keras.utils.set_random_seed(topology.rank)
    train, validation = load_data()

    model = build_model()
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.Adam(options.learning_rate), scheme=options.scheme
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [keras_callbacks.Throughput()]
    if options.checkpoint:
        callbacks.append(keras_callbacks.Checkpoint(options.checkpoint))
    history = model.fit(
        *train,
        batch_size=max(1, options.global_batch // topology.size),
        epochs=options.epochs,
        validation_data=validation,
        callbacks=callbacks,
    ).history
    accuracy = model.evaluate(*validation, verbose=0, return_dict=True)["accuracy"]
    if tp.rank() == 0:
        print(f"\n{optimizer.plan}\n")
        print(f"validation accuracy: {100 * accuracy:.2f} %")
        if speeds := history.get("samples_per_second"):
            print(f"samples per second:  {np.median(speeds):,.0f} over all ranks")
    # All ranks return the same status, because `fit` has compared their weights.
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
