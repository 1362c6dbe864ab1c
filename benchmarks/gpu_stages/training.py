"""Compares training on GPUs with Keras: on one rank, and on ranks that share each batch."""

import hashlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from benchmarks import baselines
from benchmarks.gpu_stages.device import at_most, device, gpus, median_ms, off, whole_float32

CLASSES, BATCH, STEPS = 5, 12, 6
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
EXACT = ("allreduce", "torus2d", "ps", "alltoall", "hybcomm", "factors", "sparse, all of it")
LOSSY = ("alltoall16", "bfloat16", "hitopk", "topk", "onebit")
FEW_EXACT, FEW_LOSSY = (
    ("allreduce", "alltoall", "sparse, all of it"),
    ("alltoall16", "hitopk"),
)


def schemes_by_name(names):
    """Returns the schemes of the given names, which may also be names of tfposeidon's schemes."""
    own = {
        "sparse, all of it": tp.schemes.HiTopK(density=1.0, select="exact", min_elements=0),
        "alltoall16": tp.schemes.AllToAll(wire_dtype="float16"),
        "bfloat16": tp.schemes.Torus2D(wire_dtype="bfloat16"),
        "hitopk": tp.schemes.HiTopK(density=0.1, min_elements=0),
        "topk": tp.schemes.TopK(density=0.1, wire_dtype="float16", min_elements=0),
        "onebit": baselines.OneBit(min_elements=0),
    }
    return {name: own.get(name, name) for name in names}


def mlp():
    dense = keras.layers.Dense
    return keras.Sequential(
        [keras.Input((20,)), dense(64, "relu"), dense(48, "relu"), dense(CLASSES)]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def text():
    tokens = keras.Input((8,), dtype="int32")
    embedded = keras.layers.Embedding(11, 16)(tokens)
    attended = keras.layers.MultiHeadAttention(2, 8)(embedded, embedded)
    normed = keras.layers.LayerNormalization()(embedded + attended)
    pooled = keras.layers.GlobalAveragePooling1D()(normed)
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(pooled))


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(1e-3, epsilon=1e-3)


class Case:
    """A model with its data and its optimizer, and the weights that plain Keras trains.

    Args:
      build: Function that builds the model.
      optimizer: Function that creates the optimizer.
    """

    def __init__(self, build, optimizer):
        self.build, self.optimizer = build, optimizer
        keras.utils.set_random_seed(3)
        model = build()
        self.start = model.get_weights()
        draw, count = np.random.default_rng(0), STEPS * BATCH
        shape = (count, *model.input_shape[1:])
        x = draw.integers(0, 11, shape) if build is text else draw.normal(size=shape)
        self.data = (x.astype(model.inputs[0].dtype), draw.integers(0, CLASSES, count))
        self.reference = self.trained(dense_rows(optimizer()), jit_compile=False)

    def model(self):
        """Returns a model with the initial weights."""
        model = self.build()
        model.set_weights(self.start)
        return model

    def trained(self, optimizer, data=None, batch=BATCH, epochs=1, callbacks=(), **options):
        """Returns the weights after `fit`."""
        model = self.model()
        model.compile(optimizer, LOSS, **options)
        shown = {"verbose": 0, "shuffle": False, "callbacks": list(callbacks)}
        model.fit(*(data or self.data), batch_size=batch, epochs=epochs, **shown)
        return model.get_weights()

    def off(self, weights):
        """Returns the largest difference from the reference, relative to the largest weight."""
        return off(
            np.concatenate([w.ravel() for w in weights]),
            np.concatenate([w.ravel() for w in self.reference]),
        )

    def share(self):
        """Returns this rank's part of each batch."""
        local = BATCH // tp.size()
        first = BATCH * np.arange(STEPS)[:, None] + tp.rank() * local
        rows = (first + np.arange(local)).ravel()
        return tuple(part[rows] for part in self.data)


def dense_rows(optimizer):
    """Makes gradients dense, since Keras's optimizers update rows of repeated tokens repeatedly."""
    apply = optimizer.apply
    optimizer.apply = lambda grads, *args, **named: apply(
        [tf.convert_to_tensor(grad) for grad in grads], *args, **named
    )
    return optimizer


def one(checks):
    """Checks that one rank trains the same weights as Keras."""
    whole_float32()
    tp.init()
    cases = [Case(mlp, sgd), Case(text, adam), *([] if checks.small else [Case(cnn, sgd)])]
    for case in cases:
        for scheme in EXACT if case.build is mlp and not checks.small else ("auto", "alltoall"):
            name = f"{case.build.__name__}.{scheme}"
            checks(name, _exact, case, schemes_by_name([scheme])[scheme])
    for make in (
        lambda: tp.optimizers.LARS(0.5, momentum=0.9),
        *([] if checks.small else [lambda: tp.optimizers.LAMB(1e-2)]),
    ):
        checks(make().name, _with_and_without_xla, cases[0], make)
    checks("mixed_float16", _mixed)
    checks("hand_written_loop", _loop, cases[0])


def _exact(say, case, scheme, data=None, batch=BATCH):
    keras.utils.clear_session(free_memory=False)
    optimizer = tp.DistributedOptimizer(case.optimizer(), scheme=scheme)
    at_most(say, 1e-5, case.off(case.trained(optimizer, data, batch)))


def _with_and_without_xla(say, case, make):
    found = [
        case.trained(tp.DistributedOptimizer(make()), jit_compile=jit) for jit in (False, True)
    ]
    at_most(say, 1e-4, max(map(off, *found)), "with and without XLA differ by")


def _mixed(say):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        case = Case(mlp, sgd)
        at_most(say, 1e-3, case.off(case.trained(tp.DistributedOptimizer(sgd(), "alltoall"))))
    finally:
        keras.config.set_dtype_policy("float32")


def _loop(say, case):
    model, optimizer = case.model(), tp.DistributedOptimizer(sgd(), scheme="alltoall")

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for i in range(STEPS):
        step(*(tf.constant(part[BATCH * i : BATCH * (i + 1)]) for part in case.data))
    at_most(say, 1e-5, case.off(model.get_weights()))


def gathered(text):
    """Gathers one text per rank, and returns the texts of all ranks."""
    coded = np.frombuffer(text.encode(), "u1")
    with tf.device("/CPU:0"):
        # Send at least one value, as Horovod requires, and int32, which every backend supports.
        lengths = tp.all_gather(tf.constant([len(coded)], tf.int32)).numpy()
        joined = tp.all_gather(tf.constant([*coded, 0], tf.int32)).numpy().astype("u1").tobytes()
    ends = np.cumsum(lengths + 1) - 1
    return [joined[end - n : end].decode() for end, n in zip(ends, lengths, strict=True)]


def same_everywhere(arrays):
    """Fails unless arrays have the same bits on all ranks."""
    content = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    assert len(set(gathered(hashlib.sha256(content).hexdigest()))) == 1, "replicas differ"


def begin(**options):
    """Starts a job whose ranks may share a GPU; each rank is a separate node."""
    for gpu in gpus():
        tf.config.experimental.set_memory_growth(gpu, True)
    whole_float32()
    pin_gpu = len(gpus()) >= int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))
    return tp.init(**{"ranks_per_node": 1, "stall_timeout_s": 45, "pin_gpu": pin_gpu, **options})


def two(checks):
    """Checks that ranks train like one process on the whole batch, and have the same bits."""
    few = checks.small or bool(os.environ.get("FEW"))
    checks("collectives", _collectives)
    cases = [Case(mlp, sgd)] if few else [Case(mlp, sgd), Case(cnn, sgd), Case(text, adam)]
    for case in cases:
        names = EXACT if case.build is mlp else ("allreduce", "torus2d", "hybcomm")
        names = FEW_EXACT if few else names
        for name, scheme in schemes_by_name(names).items():
            checks(f"{case.build.__name__}.{name}", _exact_on_ranks, case, scheme)
    for name, scheme in schemes_by_name(FEW_LOSSY if few else LOSSY).items():
        checks(f"lossy.{name}", _lossy, cases[0], scheme)
    checks("overflow", _overflow, cases[0])
    checks("local_updates", _local_updates, cases[0])
    checks("checkpoint", _checkpoint, cases[0])
    if not few:
        checks("large_buckets", _large_buckets)


def _collectives(say):
    for n in (1, 1000, 1_000_003):
        with tf.device(device()):
            parts = [tf.random.stateless_normal([n], [rank, 1]) for rank in range(tp.size())]
            own = tf.identity(parts[tp.rank()])
        summed = tf.function(lambda v: tp.all_reduce(v, op="sum"), autograph=False)(own)
        same_everywhere([summed])
        at_most(say, 1e-6, off(summed, sum(parts)))
        for dtype in ("float32", "float16", "int64", "uint8"):
            sent = tf.cast(100 * own, dtype)
            found = tf.function(tp.all_gather, autograph=False)(sent)
            assert (found == tf.concat([tf.cast(100 * p, dtype) for p in parts], 0)).numpy().all()
    say("sums on", summed.backing_device.rpartition("device:")[2])


def _exact_on_ranks(say, case, scheme):
    keras.utils.clear_session(free_memory=False)
    optimizer = tp.DistributedOptimizer(case.optimizer(), scheme=scheme, bucket_bytes=1024)
    weights = case.trained(optimizer, case.share(), BATCH // tp.size())
    at_most(say, 1e-5, case.off(weights))
    same_everywhere(weights)


def _lossy(say, case, scheme):
    keras.utils.clear_session(free_memory=False)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=scheme)
    weights = case.trained(optimizer, case.share(), BATCH // tp.size())
    same_everywhere(weights)
    away, moved = (
        np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(case.reference, others, strict=True)))
        for others in (weights, case.start)
    )
    say(f"{away / moved:.2g} of the way from the reference")
    assert away < moved


def _overflow(say, case):
    for scheme in ("alltoall", "hitopk"):
        keras.utils.clear_session(free_memory=False)
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = mlp()
            model.compile(tp.DistributedOptimizer(sgd(), scheme=scheme), LOSS)
            x, y = case.share()
            model.fit(x, y, batch_size=len(x), verbose=0)
            before, scale = model.get_weights(), float(model.optimizer.dynamic_scale)
            broken = x * 1e30 if tp.rank() else x
            model.fit(broken, y, batch_size=len(x), verbose=0)
            assert float(model.optimizer.dynamic_scale) == scale / 2
            assert off(before[0], model.get_weights()[0]) == 0
            model.fit(x, y, batch_size=len(x), verbose=0)
            same_everywhere(model.get_weights())
        finally:
            keras.config.set_dtype_policy("float32")
    say("skipped on all ranks, the scale halved, and training continues")


def _local_updates(say, case):
    plain = keras.optimizers.SGD
    weights = case.trained(tp.LocalUpdates(plain(0.05), 2), case.share(), BATCH // tp.size())
    same_everywhere(weights)
    replicas = [case.model() for _ in range(tp.size())]
    for replica in replicas:
        replica.compile(plain(0.05), LOSS, jit_compile=False)
    rows = np.arange(STEPS * BATCH).reshape(STEPS, tp.size(), -1)
    for step in range(STEPS):
        for replica, mine in zip(replicas, rows[step], strict=True):
            replica.train_on_batch(*(part[mine] for part in case.data))
        if step % 2:
            means = [np.mean(w, 0) for w in zip(*(r.get_weights() for r in replicas), strict=True)]
            for replica in replicas:
                replica.set_weights(means)
    at_most(say, 1e-5, max(map(off, weights, means)))


def _checkpoint(say, case):
    # All ranks run on this machine, so they can share a folder.
    folder = gathered(tempfile.mkdtemp())[0]
    scheme = tp.schemes.TopK(density=0.05, min_elements=0)

    def job(name, epochs):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        saver = keras_callbacks.Checkpoint(f"{folder}/{name}")
        callbacks = [keras_callbacks.BroadcastVariables(), saver]
        optimizer = tp.DistributedOptimizer(sgd(), scheme=scheme)
        return case.trained(optimizer, case.share(), BATCH // tp.size(), epochs, callbacks)

    whole = job("whole", 2)
    job("parts", 1)
    at_most(say, 1e-6, max(map(off, job("parts", 2), whole)), "resumed and whole differ by")


def _large_buckets(say):
    """Checks a model of 5.8 million weights, whose step has several buckets."""
    dense = keras.layers.Dense
    x = np.random.default_rng(tp.rank()).normal(size=(256, 512)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, 256)
    for scheme in ("allreduce", tp.schemes.AllToAll(wire_dtype="float16"), "hitopk"):
        keras.utils.set_random_seed(3)
        layers = [dense(1024, activation="relu") for _ in range(6)]
        model = keras.Sequential([keras.Input((512,)), *layers, dense(10)])
        model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(1e-3), scheme=scheme), LOSS)
        fit = {"batch_size": 32, "verbose": 0}
        model.fit(x, y, **fit)
        ms = median_ms(lambda model=model, fit=fit: model.fit(x, y, **fit), 3, 0) / 8
        same_everywhere(model.get_weights())
        say(f"{scheme}: {ms:.1f} ms per step")
