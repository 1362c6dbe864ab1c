"""Compares losses on ranks with unequal shares of batches with one process on whole batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import on_one_rank
from tests.helpers.training import BATCH, train_alone

pytestmark = pytest.mark.ranks("2", core=True)
ALSO_ON_FOUR_RANKS = pytest.mark.ranks("2", "2x2", core=True)

BATCHES = 4
FIRST = 8
"""Number of samples of each batch on rank 0."""
LENGTH = 8
RATE = 0.3
CrossEntropy = keras.losses.SparseCategoricalCrossentropy
Unmasked = tp.sample_counts.Unmasked


def _tagger(mask_zero=True):
    """Returns a model with a label for every token."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Embedding(11, 8, mask_zero=mask_zero)(tokens)
    return keras.Model(tokens, keras.layers.Dense(models.CLASSES)(hidden))


def _tagged(count):
    """Returns texts, which are long on rank 0, and empty on other ranks in each fourth step."""
    generator = np.random.default_rng(0)
    place, batch = np.arange(count) % BATCH, np.arange(count) // BATCH
    lengths = np.where(place < FIRST, LENGTH, np.where(batch % 4 == 3, 0, 2))
    tokens = np.where(
        np.arange(LENGTH) < lengths[:, None], generator.integers(1, 11, (count, LENGTH)), 0
    )
    return tokens, generator.integers(0, models.CLASSES, (count, LENGTH))


def _mine(data, wire):
    """Returns this rank's part of each batch, and its size; rank 0 has a fixed part."""
    places = [range(FIRST), *np.array_split(range(FIRST, BATCH), wire.topology.size - 1)]
    own = places[wire.topology.rank]
    chosen = np.isin(np.arange(len(data[0])) % BATCH, own)
    return tuple(part[chosen] for part in data), len(own)


def _trained(model, data, batch, optimizer, loss):
    model.compile(optimizer=optimizer, loss=loss)
    # The length is unknown to Keras, so ranks check at each step whether all of them have a batch.
    model.fit(
        tf.data.Dataset.from_tensor_slices(data).batch(batch).filter(lambda *_: True),
        shuffle=False,
        verbose=0,
    )
    return model.get_weights()


class _OneProcess:
    """Weights of plain Keras trained on whole batches, as the reference.

    Args:
      rate: Learning rate of SGD.
    """

    def __init__(self, build, data, loss, rate=RATE):
        self.build, self.data, self.loss, self.rate = build, data, loss, rate
        self.start = build()
        model, plain = models.copy(build, self.start), keras.optimizers.SGD(rate)
        self.end = on_one_rank(lambda: _trained(model, data, BATCH, plain, loss))

    def distance(self, wire, sample_count=None, times=1, loss=None):
        """Returns the largest difference of the ranks' weights, relative to the largest weight.

        Args:
          times: Factor on the learning rate of the ranks.
          loss: Loss of the ranks; by default that of the reference.
        """
        inner = keras.optimizers.SGD(self.rate * times)
        optimizer = tp.DistributedOptimizer(inner, sample_count=sample_count)
        model = models.copy(self.build, self.start)
        weights = _trained(model, *_mine(self.data, wire), optimizer, loss or self.loss)
        assert int(optimizer.iterations) == BATCHES
        same_on_all_ranks(weights, wire)
        furthest = max(np.abs(a - b).max() for a, b in zip(weights, self.end, strict=True))
        return furthest / max(np.abs(w).max() for w in self.end)


EXACT, FAR = 1e-5, 2e-2


@ALSO_ON_FOUR_RANKS
def test_means_over_samples_are_exact(wire):
    """The loss sums the weighted losses of the samples, and divides by their number."""
    x, y = models.mlp.data(BATCHES * BATCH)
    weights = np.random.default_rng(2).uniform(0, 3, len(x)).astype("float32")
    one = _OneProcess(models.mlp, (x, y, weights), CrossEntropy(from_logits=True))
    assert one.distance(wire) < EXACT


def test_means_by_sample_weight_are_exact_with_counts_of_weights(wire):
    x, y = models.mlp.data(BATCHES * BATCH)
    weights = np.where(np.arange(len(x)) % BATCH < FIRST, 0.1, 3.0).astype("float32")
    loss = CrossEntropy(from_logits=True, reduction="mean_with_sample_weight")
    one = _OneProcess(models.mlp, (x, y, weights), loss)
    assert one.distance(wire) > FAR
    assert one.distance(wire, tp.sample_counts.weights) < EXACT


def test_means_over_tokens_are_exact_with_counts_of_tokens(wire):
    """Padding is excluded by the model's mask, or by labels that the loss ignores."""
    x, y = _tagged(BATCHES * BATCH)
    one = _OneProcess(_tagger, (x, y), CrossEntropy(from_logits=True))
    assert one.distance(wire) > FAR
    assert one.distance(wire, Unmasked(of="x")) < EXACT
    labels = np.where(x == 0, -1, y)
    loss = CrossEntropy(from_logits=True, ignore_class=-1)
    one = _OneProcess(lambda: _tagger(mask_zero=False), (x, labels), loss)
    assert one.distance(wire) > FAR
    assert one.distance(wire, Unmasked(padding=-1)) < EXACT


def test_sums_over_samples_are_exact_with_p_times_the_rate(wire):
    """The gradient of a vector of losses is the gradient of their sum: P times the mean over P."""
    data = models.mlp.data(BATCHES * BATCH)
    one = _OneProcess(_linear, data, CrossEntropy(from_logits=True, reduction="sum"), RATE / BATCH)
    assert one.distance(wire, times=tp.size()) > FAR
    vectors = CrossEntropy(from_logits=True, reduction="none")
    for loss in (None, vectors):
        assert one.distance(wire, tp.sample_counts.equal, times=tp.size(), loss=loss) < EXACT
    # A regularizer counts once, so the loss is multiplied by P in place of the learning rate.
    loss = CrossEntropy(from_logits=True, reduction="sum")
    one = _OneProcess(models.mlp, data, loss, RATE / BATCH)
    assert (
        one.distance(wire, tp.sample_counts.equal, loss=lambda y, p: tp.size() * loss(y, p)) < EXACT
    )


def _linear():
    return keras.Sequential([keras.Input((20,)), keras.layers.Dense(models.CLASSES)])


def test_products_of_means_are_not_exact(wire):
    """With batch normalization, for example, each rank has means of only its own part."""
    loss = lambda y, p: keras.ops.mean(p[:, 0]) * keras.ops.mean(p[:, 1])  # noqa: E731
    one = _OneProcess(_linear, models.mlp.data(BATCHES * BATCH), loss)
    for sample_count in (None, tp.sample_counts.equal):
        assert one.distance(wire, sample_count) > FAR


def test_accumulated_tokens_have_equal_weight(wire):
    """This holds for the tokens of all calls of an update and of all ranks."""
    x, y = _tagged(BATCHES * BATCH)
    start = _tagger()
    loss = CrossEntropy(from_logits=True)
    both = [np.concatenate([part[i::BATCH] for i in range(BATCH)]) for part in (x, y)]
    plain = keras.optimizers.SGD(RATE)
    reference = train_alone(models.copy(_tagger, start), both, plain, batch_size=len(both[0]))
    model = models.copy(_tagger, start)
    inner = keras.optimizers.SGD(RATE, gradient_accumulation_steps=BATCHES)
    model.compile(
        optimizer=tp.DistributedOptimizer(inner, sample_count=Unmasked(of="x")), loss=loss
    )
    mine, batch = _mine((x, y), wire)
    model.fit(*mine, batch_size=batch, shuffle=False, verbose=0)
    for weight, expected in zip(model.get_weights(), reference, strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-5)


def test_a_count_for_each_sample_is_refused(wire):
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.SGD(RATE), sample_count=lambda data: tf.ones_like(data[1])
    )
    model.compile(optimizer=optimizer, loss=models.LOSS)
    with Raises(
        ValueError,
        r"must return a single number for each batch. Received: shape \(.*Return its sum",
    ):
        model.fit(*models.mlp.data(8), verbose=0)
