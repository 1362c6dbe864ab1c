"""Provides a CNN, and scikit-learn's handwritten digits, which replace a download of MNIST."""

import sysconfig
from pathlib import Path

import keras
import numpy as np

DATA = Path(sysconfig.get_path("purelib")) / "sklearn" / "datasets" / "data" / "digits.csv.gz"
TRAIN = 1500


def load_data():
    """Returns training and test data in the form of `keras.datasets.mnist.load_data`."""
    rows = np.loadtxt(DATA, delimiter=",", dtype=np.float32)
    images, labels = rows[:, :-1].reshape(-1, 8, 8, 1) / 16, rows[:, -1].astype(int)
    return (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])


def build_model():
    """Returns an unbuilt model that outputs the probability of each digit."""
    return keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
