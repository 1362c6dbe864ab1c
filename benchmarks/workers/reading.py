"""Reads samples through the cache, and by other methods.

The last line of the output is the answer, as JSON.
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import datacache


class Drawn:
    """Source of records that are cheap to create.

    Args:
      size: Side of the images in pixels.
      samples: Number of records.
    """

    def __init__(self, size, samples):
        self.identity = {"kind": "drawn", "size": size, "samples": samples}
        self.signature = [tf.TensorSpec([size, size, 3], tf.uint8)]
        self._samples = samples
        self._first = np.random.default_rng(0).integers(0, 256, (size, size, 3)).astype("uint8")

    def __len__(self):
        return self._samples

    def name(self, sample):
        """Returns the name of a record."""
        return f"record {sample}"

    def read(self, sample):
        """Returns the parts of a record."""
        return [self._first + np.uint8(sample % 256)]

    def decode(self, *stored):
        """Returns the stored record unchanged."""
        return stored[0]


def rate(data):
    """Returns samples per second of one epoch."""
    return rates(data)[0]


def rates(data):
    """Returns samples per second of one epoch, and of this epoch without its first batch."""
    begin = first = time.perf_counter()
    samples = []
    for batch in data:
        samples.append(int(tf.nest.flatten(batch)[0].shape[0]))
        if len(samples) == 1:
            first = time.perf_counter()
    end = time.perf_counter()
    return sum(samples) / (end - begin), sum(samples[1:]) / (end - first)


def as_dataset(source, size):
    """Returns the samples one by one, as a `tf.data` pipeline reads them."""

    def read(sample):
        return source.read(sample)[0]

    def make(sample):
        return tf.ensure_shape(tf.numpy_function(read, [sample], tf.uint8), [size, size, 3])

    return tf.data.Dataset.range(len(source)).map(make)


# ---------------------------------------------------------------------- warm


def warm(size, samples, batch, rounds, folder, copier):
    """Measures the cache, `.cache()` with a full shuffle, and one thread that only copies.

    Each system is measured once per round.

    Args:
      size: Side of the images in pixels.
      samples: Number of records.
      batch: Batch size.
      rounds: Number of rounds whose measurements are used.
      folder: Name of the cache's folder in /dev/shm.
      copier: Path of the compiled `native/random_records.c`.
    """
    source = Drawn(size, samples)
    cache = datacache.Cache(source, memory=Path("/dev/shm") / folder)
    cache.warm(progress=False)
    record = size * size * 3
    plain = as_dataset(source, size)
    systems = {
        "datacache": cache.dataset(batch),
        "tf.data cache": plain.cache().shuffle(samples).batch(batch).prefetch(tf.data.AUTOTUNE),
    }
    # The copies begin with the store's header, which has no effect on their speed.
    pool = cache._tiers.pool.folder / "datacache.store"
    copies = [copier, pool, str(record), str(samples), str(batch), "2"]
    found = {name: [] for name in ("copies", *systems)}
    for turn in range(rounds + 1):
        # Use the second pass, because the first pass of each copier maps its pages.
        copied = float(
            subprocess.run(copies, check=True, capture_output=True, text=True).stdout.split()[1]
        )
        once = {"copies": (copied, copied)} | {name: rates(data) for name, data in systems.items()}
        for name, values in once.items():
            found[name] += [values] if turn else []
    cache.close()
    parts = {name: list(zip(*values, strict=True)) for name, values in found.items()}
    return {
        name: {"samples_per_second": whole, "after_the_first": after}
        for name, (whole, after) in parts.items()
    }


# ---------------------------------------------------------------------- jobs


def _job(size, samples, batch, folder, found):
    """Opens a warm store as a new job does, builds a model, and reads four epochs."""
    cache = datacache.Cache(Drawn(size, samples), memory=Path("/dev/shm") / folder)
    data = cache.dataset(batch)
    model = keras.Sequential(
        [keras.Input((size, size, 3)), keras.layers.Conv2D(8, 3), keras.layers.Flatten()]
    )
    model.compile("sgd", "mse")
    outputs = np.zeros((2, *model.output_shape[1:]), "float32")
    model.train_on_batch(np.zeros((2, size, size, 3), "float32"), outputs)
    found.put([rate(data) for _ in range(4)])
    cache.close()


def jobs(size, samples, batch, rounds, folder):
    """Measures epochs of new jobs on a warm store; a job verifies the samples that it reads.

    Args:
      size: Side of the images in pixels.
      samples: Number of records.
      batch: Batch size.
      rounds: Number of rounds.
      folder: Name of the cache's folder in /dev/shm.
    """
    spawn = multiprocessing.get_context("spawn")
    cache, found = (
        datacache.Cache(Drawn(size, samples), memory=Path("/dev/shm") / folder),
        spawn.Queue(),
    )
    first, later = [], []
    for _ in range(rounds):
        cache.clear()
        cache.warm(progress=False)
        process = spawn.Process(target=_job, args=(size, samples, batch, folder, found))
        process.start()
        epochs = found.get(timeout=600)
        process.join()
        first.append(epochs[0])
        later.append(statistics.median(epochs[1:]))
    cache.close()
    return {"a new job": {"first": first, "later": later}}


# ---------------------------------------------------------------------- cold


def decoded(contents, label):
    """Returns 96 x 96 pixels of a JPEG file's contents, and the label."""
    return tf.cast(tf.image.resize(tf.io.decode_jpeg(contents, 3), [96, 96]), tf.uint8), label


def uncached(images, batch, **options):
    """Returns the dataset of the TensorFlow tutorials.

    Args:
      images: Folder of the files.
      batch: Batch size.
      **options: Keyword arguments of `tf.data.Dataset.map`.
    """
    source = datacache.from_folder(images)
    names = tf.data.Dataset.from_tensor_slices(
        ([source.name(i) for i in range(len(source))], source._classes)
    )
    data = names.shuffle(len(source)).map(
        lambda name, label: decoded(tf.io.read_file(name), label), **options
    )
    return data.batch(batch).prefetch(tf.data.AUTOTUNE)


TUNED_READS = 64
"""Number of files that the tuned reader opens at the same time; the cache opens 32."""


def tuned(images, batch):
    """Returns a tuned `tf.data` dataset.

    It reads many files in parallel, in its own threads.
    """
    source = datacache.from_folder(images)
    names = tf.data.Dataset.from_tensor_slices(
        ([source.name(i) for i in range(len(source))], source._classes)
    )
    read = names.shuffle(len(source)).map(
        lambda name, label: (tf.io.read_file(name), label),
        num_parallel_calls=TUNED_READS,
        deterministic=False,
    )
    data = read.map(decoded, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    options = tf.data.Options()
    options.threading.private_threadpool_size = TUNED_READS
    return data.batch(batch).prefetch(tf.data.AUTOTUNE).with_options(options)


def cold(images, batch, folder):
    """Measures epochs from a slow source: first and later ones with the cache, and one without."""
    cache = datacache.Cache(
        datacache.from_folder(images), decoded, memory=Path("/dev/shm") / folder
    )
    data = cache.dataset(batch)
    first = rate(data)
    later = statistics.median(rate(data) for _ in range(5))
    cache.close()
    plain = rate(uncached(images, batch, num_parallel_calls=tf.data.AUTOTUNE))
    by_hand = rate(tuned(images, batch))
    return {
        "datacache, first epoch": {"samples_per_second": [first]},
        "datacache, later": {"samples_per_second": [later]},
        "tf.data": {"samples_per_second": [plain]},
        "tf.data, tuned": {"samples_per_second": [by_hand]},
    }


def decoding(images, batch, rounds, folder):
    """Measures epochs from a fast source, where decoding is the bottleneck.

    Epochs of the cache alternate with epochs that `tf.data` reads and decodes.
    """
    found = {"decoding": [], "datacache, first epoch": [], "datacache, later": []}
    for turn in range(rounds):
        found["decoding"].append(rate(uncached(images, batch, num_parallel_calls=2)))
        source = datacache.from_folder(images)
        # Use a new version in each turn, so that the first epoch finds no cached samples.
        cache = datacache.Cache(source, decoded, memory=Path("/dev/shm") / folder, version=turn)
        data = cache.dataset(batch)
        found["datacache, first epoch"].append(rate(data))
        found["datacache, later"].append(rate(data))
        cache.close()
    return {name: {"samples_per_second": values} for name, values in found.items()}


# -------------------------------------------------------------------- memory


def _hold(what, size, samples, folder, ready, leave, found):
    """Reads two epochs on one rank, and reports its memory while all ranks hold their data."""
    source = Drawn(size, samples)
    data = []
    if what == "datacache":
        cache = datacache.Cache(source, memory=Path("/dev/shm") / folder)
        data = cache.dataset(256)
    elif what == "tf.data cache":
        data = as_dataset(source, size).cache().batch(256).prefetch(tf.data.AUTOTUNE)
    for _ in range(2):
        for batch in data:
            del batch
    # Start TensorFlow's runtime even if nothing was read, as in the other cases.
    tf.zeros(1)
    ready.wait()
    lines = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    found.put(int(lines["Pss"].split()[0]) * 1024)
    leave.wait()


def memory(what, ranks, size, samples, folder):
    """Measures bytes that ranks hold together, each page counted once (PSS)."""
    spawn = multiprocessing.get_context("spawn")
    ready, leave, found = spawn.Barrier(ranks), spawn.Barrier(ranks + 1), spawn.Queue()
    arguments = (what, size, samples, folder, ready, leave, found)
    processes = [spawn.Process(target=_hold, args=arguments) for _ in range(ranks)]
    for process in processes:
        process.start()
    # Ranks exit after all have measured, because pages shared with an exited rank count for others.
    held = [found.get() for _ in processes]
    leave.wait()
    for process in processes:
        process.join()
    return {what: {"held": sum(held), "data": size * size * 3 * samples}}


# ------------------------------------------------------------------ training


class Timer(keras.callbacks.Callback):
    """Times epochs of `fit`, and emulates the accelerator.

    Args:
      step_s: Seconds of a step on the accelerator.
    """

    def __init__(self, step_s):
        super().__init__()
        self.step_s, self.epochs = step_s, []

    @override
    def on_epoch_begin(self, epoch, logs=None):
        self.begin, self.steps = time.perf_counter(), 0

    @override
    def on_train_batch_end(self, batch, logs=None):
        # Wait for the emulated accelerator.
        time.sleep(self.step_s)
        self.steps += 1

    @override
    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append({"seconds": time.perf_counter() - self.begin, "steps": self.steps})


def training(images, batch, step_s, epochs, folder):
    """Measures epochs of `fit` on a model whose step takes `step_s` on an accelerator."""
    cache = datacache.Cache(
        datacache.from_folder(images), decoded, memory=Path("/dev/shm") / folder
    )
    data = {
        "tf.data": uncached(images, batch, num_parallel_calls=tf.data.AUTOTUNE),
        "tf.data, tuned": tuned(images, batch),
        "datacache": cache.dataset(batch),
    }
    local = tf.data.Dataset.from_tensors(
        (np.zeros((batch, 96, 96, 3), "uint8"), np.zeros(batch, "int64"))
    )
    data["no reading"] = local.repeat(-(-len(cache) // batch))
    answer = {}
    for name, batches in data.items():
        layers = [
            keras.Input((96, 96, 3)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential(layers)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        timer = Timer(step_s)
        model.fit(
            batches.map(lambda x, y: (tf.cast(x, "float32") / 255, y)),
            epochs=epochs,
            verbose=0,
            shuffle=False,
            callbacks=[timer],
        )
        answer[name] = {"epochs": timer.epochs, "samples": len(cache)}
    cache.close()
    return answer


def main():
    task = json.loads(sys.argv[1])
    answer = globals()[task.pop("kind")](**task)
    print(json.dumps(answer))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
