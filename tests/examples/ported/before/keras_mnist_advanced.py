"""Trains on repeated augmented data, with a warm-up, and a rate that falls on a plateau."""

import horovod.keras as hvd
import keras
import tensorflow as tf
from digits import build_model, load_data

BATCH = 32

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

train, test = load_data()
train_batches, test_batches = (len(labels) // BATCH for _, labels in (train, test))
augment = keras.layers.RandomTranslation(0.08, 0.08)
data = tf.data.Dataset.from_tensor_slices(train).repeat().shuffle(1500).batch(BATCH)
data = data.map(lambda x, y: (augment(x), y)).prefetch(2)
test_data = tf.data.Dataset.from_tensor_slices(test).repeat().shuffle(300).batch(BATCH)

model = build_model()
rate = 1.0 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adadelta(rate))
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2, verbose=1),
    keras.callbacks.ReduceLROnPlateau(patience=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))

model.fit(
    data,
    steps_per_epoch=train_batches // hvd.size(),
    epochs=6,
    callbacks=callbacks,
    validation_data=test_data,
    validation_steps=3 * test_batches // hvd.size(),
)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"accuracy {accuracy:.3f}")
