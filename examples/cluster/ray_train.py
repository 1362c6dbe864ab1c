"""Trains a small CNN on two Ray workers. Change: `train`, `num_workers`, for GPUs `use_gpu=True`.

ray job submit --working-dir examples/cluster -- python ray_train.py
"""

from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train():
    import keras
    import numpy as np

    import tfposeidon as tp

    images = np.random.default_rng(0).random((256, 8, 8, 1), "float32")
    x, y = tp.shard((images, images.mean((1, 2, 3)) > 0.5))
    layers = [keras.layers.Conv2D(8, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    history = model.fit(x, y, verbose=0).history
    print(f"rank {tp.rank()} of {tp.size()}: loss {history['loss'][-1]:.6f}", flush=True)


if __name__ == "__main__":
    TensorflowTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
