"""Times train steps with gradients that XLA compiles into zero, one or several functions."""

import time

import keras
import numpy as np

import tfposeidon as tp
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects

TOKENS, VOCABULARY = 64, 8192


def transformer(width, blocks):
    """Returns a Transformer encoder of Keras layers that predicts a token at each position."""
    layers = keras.layers
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, width)(tokens)
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(4, width // 4)(x, x)
        x = layers.LayerNormalization()(x + attended)
        hidden = layers.Dense(4 * width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    return keras.Model(tokens, layers.Dense(width)(x))


def main():
    task = Task.from_argument()
    tp.init()
    wire, generator = runtime.wire(), np.random.default_rng(task.rank)
    x = generator.integers(0, VOCABULARY, (task.batch, TOKENS))
    y = generator.normal(size=(task.batch, TOKENS, task.width)).astype("float32")
    models, times, exposed = {}, {name: [] for name in task.systems}, {}
    for name in task.systems:
        optimizer = tp.DistributedOptimizer(
            keras.optimizers.SGD(0.01), "allreduce", xla_segments=int(name) or None
        )
        optimizer.exchange.is_timed = True
        models[name] = transformer(task.width, task.blocks)
        models[name].compile(optimizer, "mse", jit_compile=False)
        begin_s = time.perf_counter()
        models[name].train_on_batch(x, y)
        times[name].append(time.perf_counter() - begin_s)
    for _ in range(1 + task.rounds):
        for name, model in models.items():
            exchange_objects(None, wire, "ready")
            before_s, begin_s = model.optimizer.exposed_s, time.perf_counter()
            for _ in range(task.steps):
                model.train_on_batch(x, y)
            step_s = (time.perf_counter() - begin_s) / task.steps
            times[name].append(max(exchange_objects(step_s, wire, "step_s")))
            exposed_s = (model.optimizer.exposed_s - before_s) / task.steps
            exposed.setdefault(name, []).append(max(exchange_objects(exposed_s, wire, "exposed")))
    for name, (trace_s, _, *step_s) in times.items():
        figures = {"trace_s": trace_s, "step_s": step_s, "exposed_s": exposed[name][1:]}
        task.note(name, figures)


if __name__ == "__main__":
    main()
