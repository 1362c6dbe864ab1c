"""Provides data of unknown length, and models for ranks with unequal data."""

import tensorflow as tf

from tests.helpers import models
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import distributed, sgd


def compiled_for_lengths(
    scheme="alltoall", inner=None, around=lambda optimizer: optimizer, **options
):
    model = models.mlp()
    optimizer = around(distributed(inner or sgd(), scheme=scheme))
    model.compile(optimizer=optimizer, loss=models.LOSS, **options)
    return model, optimizer


def of_unknown_length(batches, drop_remainder=False):
    x, y = models.mlp.data(4 * batches)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=drop_remainder)
    return data.filter(lambda *_: True)


def check_together(model, optimizer, wire, updates):
    assert int(optimizer.iterations) == updates
    same_on_all_ranks([*model.get_weights(), *(v.numpy() for v in optimizer.variables)], wire)
