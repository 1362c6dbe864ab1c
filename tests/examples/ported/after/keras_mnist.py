"""Trains on arrays; the number of epochs and the learning rate depend on the number of ranks."""

import math

import keras
from digits import build_model, load_data

import tfposeidon as tp

epochs = math.ceil(12 / tp.size())
(x_train, y_train), (x_test, y_test) = load_data()
y_train, y_test = (keras.utils.to_categorical(y, 10) for y in (y_train, y_test))

model = build_model()
optimizer = tp.DistributedOptimizer(keras.optimizers.Adadelta(1.0 * tp.size()))
model.compile(optimizer=optimizer, loss="categorical_crossentropy", metrics=["accuracy"])

x, y = tp.shard((x_train, y_train))
model.fit(
    x,
    y,
    batch_size=32,
    epochs=epochs,
    callbacks=[keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.keras")],
    validation_data=tp.shard((x_test, y_test)),
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"accuracy {accuracy:.3f}")
