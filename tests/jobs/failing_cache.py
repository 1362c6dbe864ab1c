"""Trains on a partitioned cache until rank 1 fails: `failing_cache.py FOLDER raise|source`."""

import sys
from pathlib import Path

import keras
import tensorflow as tf

import datacache
import keras_callbacks
import tfposeidon as tp
from datacache.sources.image_folder import FolderSource
from tests import drawn


class Trouble(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if tp.rank() == 1 and batch == 2:
            raise ValueError("broken on purpose")


class Unreadable(FolderSource):
    """Source of which rank 1 can read only the first sample."""

    def read(self, sample):
        if tp.rank() == 1 and sample:
            raise OSError(5, "Input/output error")
        return super().read(sample)


def main(folder, trouble):
    tp.init(ranks_per_node=1, stall_timeout_s=20, transport_timeout_s=10, network="unknown")
    kind = Unreadable if trouble == "source" else FolderSource
    source = kind(Path(folder) / "images", [".png"], True)
    memory = Path(folder) / f"memory{tp.rank()}"
    cache = datacache.Cache(source, drawn.decode, memory=memory, partition="split")
    data = cache.dataset(8).map(lambda pixels, label: (tf.cast(pixels, "float32"), label))
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(drawn.CLASSES)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(1e-3)), loss)
    callbacks = [keras_callbacks.BroadcastVariables(), keras_callbacks.CachePosition(cache)]
    callbacks += [Trouble()] if trouble == "raise" else []
    model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    print("the job went on", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
