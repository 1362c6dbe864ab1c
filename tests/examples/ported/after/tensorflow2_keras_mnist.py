"""Trains on a repeated dataset, whose steps are divided by the number of ranks."""

import keras
import tensorflow as tf
from digits import build_model, load_data

import keras_callbacks
import tfposeidon as tp

train, _ = load_data()
data = tp.shard(tf.data.Dataset.from_tensor_slices(train).repeat().shuffle(1500).batch(32))

model = build_model()
rate = 0.002 * tp.size()
optimizer = tp.DistributedOptimizer(keras.optimizers.Adam(rate))
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(),
    metrics=["accuracy"],
)

callbacks = [
    keras_callbacks.LearningRateWarmup(rate, warmup_epochs=3),
    keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.keras"),
]
model.fit(data, steps_per_epoch=100 // tp.size(), callbacks=callbacks, epochs=6)
