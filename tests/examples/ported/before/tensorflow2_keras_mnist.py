"""Trains on a repeated dataset, whose steps are divided by the number of ranks."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from digits import build_model, load_data

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

train, _ = load_data()
data = tf.data.Dataset.from_tensor_slices(train).repeat().shuffle(1500).batch(32)

model = build_model()
rate = 0.002 * hvd.size()
optimizer = hvd.DistributedOptimizer(
    tf.keras.optimizers.Adam(rate), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    optimizer=optimizer,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(),
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))

verbose = 1 if hvd.rank() == 0 else 0
model.fit(data, steps_per_epoch=100 // hvd.size(), callbacks=callbacks, epochs=6, verbose=verbose)
