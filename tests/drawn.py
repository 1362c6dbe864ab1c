"""Creates random images for tests, each reproducible from its number."""

import numpy as np
import tensorflow as tf

CLASSES = 3


def image(number, size=8):
    """Returns the image with this number, `[size, size, 3]` uint8."""
    return np.random.default_rng(number).integers(0, 256, (size, size, 3)).astype("uint8")


def folder(path, samples, size=8):
    """Writes images as PNG files into a folder per class, and returns the path."""
    for number in range(samples):
        file = path / f"class{number * CLASSES // samples}" / f"{number:05}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(image(number, size)).numpy())
    return path


def decode(contents, label):
    """Preprocesses the contents of a file for a cache; returns the pixels and the label."""
    return tf.ensure_shape(tf.io.decode_png(contents, 3), [8, 8, 3]), label


def numbers(batches, samples):
    """Returns the numbers of the images in batches, and checks their labels."""
    known = {image(number).tobytes(): number for number in range(samples)}
    found = []
    for pixels, labels in batches:
        for image_, label in zip(np.asarray(pixels), np.asarray(labels), strict=True):
            found.append(known[image_.tobytes()])
            assert label == found[-1] * CLASSES // samples
    return found
