"""Trains on arrays; the number of epochs and the learning rate depend on the number of ranks."""

import math

import horovod.keras as hvd
import keras
import tensorflow as tf
from digits import build_model, load_data

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

epochs = math.ceil(12 / hvd.size())
(x_train, y_train), (x_test, y_test) = load_data()
y_train, y_test = (keras.utils.to_categorical(y, 10) for y in (y_train, y_test))

model = build_model()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adadelta(1.0 * hvd.size()))
model.compile(optimizer=optimizer, loss="categorical_crossentropy", metrics=["accuracy"])

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))

model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=epochs,
    callbacks=callbacks,
    verbose=1 if hvd.rank() == 0 else 0,
    validation_data=(x_test, y_test),
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"accuracy {accuracy:.3f}")
