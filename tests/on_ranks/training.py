"""Several ranks train to the same weights as one process on the whole batch."""

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from tests.on_ranks import models
from tests.on_ranks.models import same_on_all_ranks

STEPS = 10
BATCH = 12
SOME = ("asa", tp.schemes.ShardedServer(update="server", pair_bytes=256), "hybcomm")
EXACT = ("allreduce", "2dtar", "ps", *SOME)


def train_alone(model, data, optimizer, **fit):
    """The reference: plain Keras, whole batches."""
    model.compile(optimizer=dense_rows(optimizer), loss=models.LOSS)
    # Before the first step, which TensorFlow would trace twice if it made variables.
    model.optimizer.build(model.trainable_variables)
    model.fit(*data, **{"batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": 0, **fit})
    return model.get_weights()


def dense_rows(optimizer):
    """Keras's optimizers update a row once per repetition of a token: the reference must not."""
    apply, dense = (
        optimizer.apply,
        lambda g: tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g,
    )
    optimizer.apply = lambda grads, variables=None: apply([dense(g) for g in grads], variables)
    return optimizer


def train_together(model, data, optimizer, wire, compile=None, **fit):
    """Each rank gets its share of each batch."""
    model.compile(optimizer=optimizer, loss=models.LOSS, **(compile or {}))
    share = models.share(data, BATCH, wire.topology)
    options = {
        "batch_size": BATCH // wire.topology.size,
        "epochs": 1,
        "shuffle": False,
        "verbose": 0,
        **fit,
    }
    model.fit(*share, **options)
    return model.get_weights()


def check_equal(weights, reference):
    largest = max(np.abs(w).max() for w in reference)
    for weight, expected in zip(weights, reference, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-5 * largest)


def check_close(weights, reference, start, share):
    """Checks that each variable is within this share of the reference's own move."""
    for weight, expected, before in zip(weights, reference, start, strict=True):
        moved = np.linalg.norm(expected - before)
        assert moved > 0, "nothing was learnt, so nothing was compared"
        assert (off := np.linalg.norm(weight - expected) / moved) <= share, (
            f"{off:.2g} of what training moved"
        )


def _compare(build, make_optimizer, wire, schemes=EXACT):
    data = build.data(STEPS * BATCH)
    start = build()
    reference = train_alone(models.copy(build, start), data, make_optimizer())
    for scheme in schemes:
        optimizer = tp.DistributedOptimizer(make_optimizer(), scheme=scheme, bucket_bytes=1024)
        weights = train_together(models.copy(build, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
    moved = max(np.abs(a - b).max() for a, b in zip(reference, start.get_weights(), strict=True))
    assert moved > 1e-3, "nothing was learnt, so nothing was compared"


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(1e-3, epsilon=1e-3)


def case_mlp_sgd(wire):
    _compare(models.mlp, sgd, wire)


def case_mlp_adam(wire):
    _compare(models.mlp, adam, wire, SOME)


def case_cnn_sgd(wire):
    _compare(models.cnn, sgd, wire, SOME)


def case_cnn_adam(wire):
    _compare(models.cnn, adam, wire, ["asa"])


def case_attention_sgd(wire):
    _compare(models.attention, sgd, wire)


def case_attention_adam(wire):
    _compare(models.attention, adam, wire, ["2dtar"])


def case_embedding_sgd(wire):
    _compare(models.embedding, sgd, wire, SOME)


def case_sixteen_bits_come_close(wire):
    data = models.mlp.data(STEPS * BATCH)
    start = models.mlp()
    reference = train_alone(models.copy(models.mlp, start), data, sgd())
    for scheme, share in (
        ("asa16", 2e-3),
        (tp.schemes.AllReduce(wire_dtype="float16"), 2e-3),
        (tp.schemes.Torus2D(wire_dtype="bfloat16"), 0.02),
    ):
        model = models.copy(models.mlp, start)
        weights = train_together(model, data, tp.DistributedOptimizer(sgd(), scheme=scheme), wire)
        same_on_all_ranks(weights, wire)
        check_close(weights, reference, start.get_weights(), share)
