r"""Trains twice on images in folders: first with an empty cache, then with a full one.

The second run reads no file of the source.

horovodrun -np 2 python examples/image_folder.py
python -m tfposeidon lab --nodes 2 --per-node 2 --inter 200mbit -- \
  python examples/image_folder.py --partition split
"""

import argparse
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import datacache
import keras_callbacks
import tfposeidon as tp

SIZE = 16


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default="/tmp/datacache-digits",
        help="folder of images, with one folder per class; created if it is missing",
    )
    parser.add_argument("--memory", default="auto", help="folder of the shared-memory store")
    parser.add_argument(
        "--tfds", action="store_true", help="read the images from a tensorflow-datasets builder"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--global-batch", type=int, default=64, help="samples per step over all ranks together"
    )
    parser.add_argument("--disk", type=Path, help="folder on a local disk for copies of the files")
    parser.add_argument(
        "--partition",
        default="auto",
        help="auto, replicate (each node holds all samples) or split (each node holds a part)",
    )
    parser.add_argument(
        "--goal", type=float, default=0.85, help="training accuracy below which the job fails"
    )
    return parser.parse_args()


def draw(folder):
    """Writes scikit-learn's handwritten digits as PNG files, in a folder for each digit."""
    digits = load_digits()
    # Rename the folder at the end, so that a folder with the final name is always complete.
    part = folder.with_name(f"{folder.name}.part")
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        file = part / str(label) / f"{index:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.kron(image * 15.9, np.ones((2, 2))).astype("uint8")[..., np.newaxis]
        file.write_bytes(tf.io.encode_png(pixels).numpy())
    part.rename(folder)


def as_tfds(folder):
    """Prepares a builder of tensorflow-datasets from the images of a folder, and returns it."""
    import tensorflow_datasets as tfds

    class Digits(tfds.core.GeneratorBasedBuilder):
        """Images of a folder."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            image, label = (
                tfds.features.Image(shape=(None, None, 1)),
                tfds.features.ClassLabel(num_classes=10),
            )
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"image": image, "label": label})
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for file in sorted(folder.glob("*/*.png")):
                yield (
                    f"{file.parent.name}/{file.name}",
                    {"image": str(file), "label": int(file.parent.name)},
                )

    builder = Digits(data_dir=folder.with_name(f"{folder.name}-tfds"))
    if tp.rank() == 0:
        builder.download_and_prepare()
    tp.barrier()
    # A builder finds only data that were prepared before it was created.
    return Digits(data_dir=folder.with_name(f"{folder.name}-tfds"))


def source_and_function(options):
    """Returns the source, and the function that maps its samples to cached samples."""

    def resized(image):
        return tf.cast(tf.image.resize(image, [SIZE, SIZE]), tf.uint8)

    if options.tfds:
        source = datacache.from_tfds(as_tfds(options.folder), "train")
        return source, lambda sample: (resized(sample["image"]), sample["label"])
    return datacache.from_folder(options.folder), lambda contents, label: (
        resized(tf.io.decode_png(contents, 1)),
        label,
    )


def augment(image, label):
    """Shifts an image by up to one pixel, and converts it to float32.

    The cache stores images before augmentation, so that shifts differ between epochs. Cached images
    are uint8, which takes a quarter of the memory of float32.
    """
    shift = tf.random.uniform([2], -1, 2, tf.int32)
    return tf.roll(tf.cast(image, tf.float32) / 255, shift, [1, 2]), label


def build_model():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def train(options, source, preprocess):
    """Opens the cache, trains a model, and returns seconds, megabytes read and accuracy."""
    cache = datacache.Cache(
        source, preprocess, memory=options.memory, disk=options.disk, partition=options.partition
    )
    data = cache.dataset(options.global_batch).map(augment).prefetch(2)
    model = build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tp.DistributedOptimizer(keras.optimizers.Adam(3e-3))
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [
        keras_callbacks.CachePosition(cache),
        keras_callbacks.CacheStatistics(cache),
        keras_callbacks.Throughput(),
    ]
    begin = time.perf_counter()
    history = model.fit(data, epochs=options.epochs, callbacks=callbacks, shuffle=False).history
    seconds = time.perf_counter() - begin
    cache.close()
    return {
        "seconds": seconds,
        "accuracy": history["accuracy"][-1],
        "read": sum(history["cache_source_megabytes"]),
    }


def main():
    options = parse_arguments()
    tp.init()
    keras.utils.set_random_seed(tp.rank())
    if tp.rank() == 0 and not options.folder.exists():
        draw(options.folder)
    tp.barrier()
    source, preprocess = source_and_function(options)
    runs = {name: train(options, source, preprocess) for name in ("cold", "warm")}
    if tp.rank() == 0:
        for name, run in runs.items():
            print(
                f"{name}: {run['seconds']:.1f} s, {run['read']:.2f} MB read from the source, "
                f"accuracy {100 * run['accuracy']:.1f} %"
            )
    return 0 if min(run["accuracy"] for run in runs.values()) >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
