"""Trains on repeated augmented data, with a warm-up, and a rate that falls on a plateau."""

import keras
import tensorflow as tf
from digits import build_model, load_data

import keras_callbacks
import tfposeidon as tp

BATCH = 32

train, test = load_data()
train_batches = len(train[1]) // BATCH
augment = keras.layers.RandomTranslation(0.08, 0.08)
data = tf.data.Dataset.from_tensor_slices(train).repeat().shuffle(1500).batch(BATCH)
data = tp.shard(data.map(lambda x, y: (augment(x), y)).prefetch(2))
test_data = tp.shard(tf.data.Dataset.from_tensor_slices(test).batch(BATCH))

model = build_model()
rate = 1.0 * tp.size()
optimizer = tp.DistributedOptimizer(keras.optimizers.Adadelta(rate))
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    keras_callbacks.LearningRateWarmup(rate, warmup_epochs=2),
    keras.callbacks.ReduceLROnPlateau(patience=2, verbose=1),
    keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.keras"),
]

model.fit(
    data,
    steps_per_epoch=train_batches // tp.size(),
    epochs=6,
    callbacks=callbacks,
    validation_data=test_data,
)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"accuracy {accuracy:.3f}")
