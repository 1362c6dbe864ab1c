"""Custom schemes that use only `tp.schemes`, are not registered, and are passed as objects."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.automatic import exchange_seconds
from tests.helpers.checks import Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import BATCH, STEPS, check_equal, sgd, train_alone, train_together

MOST = 2**20
RING = tp.schemes.AllReduce()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathered(tp.schemes.Scheme):
    """Gathers the gradients of all ranks, and averages them except for the ranks `without`."""

    without: tuple[int, ...] = ()
    small: tp.schemes.Scheme = RING

    @property
    def exact(self):
        return not self.without

    @property
    def min_length(self):
        return 16

    @property
    def for_small_variables(self):
        return self.small

    def exchange(self, gradient, state, wire, name):
        gathered = wire.all_gather(gradient[tf.newaxis], wire.topology.world, name)
        others = [rank for rank in range(wire.topology.size) if rank not in self.without]
        return tf.reduce_mean(tf.gather(gathered, others), 0), state

    def stages(self, length, itemsize, topology):
        parts_bytes = (float(length * itemsize),) * topology.size
        return tp.schemes.stages.gathering(topology.world, parts_bytes, "", itemsize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce(Gathered):
    """Scheme with the same name as one of tfposeidon's classes."""


def _sgd(scheme):
    return tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=scheme)


RULES = [("kernel", AllReduce(without=(7,))), (".*", "torus2d")]


@pytest.mark.parametrize("scheme", [Gathered(), AllReduce(without=(1, 2)), RULES], ids=str)
def test_a_custom_scheme_is_saved_with_the_optimizer(scheme):
    optimizer = _sgd(scheme)
    config = json.loads(json.dumps(optimizer.get_config()))
    assert tp.DistributedOptimizer.from_config(config).policy == optimizer.policy
    optimizer.build(models.mlp().trainable_variables)
    assert json.loads(optimizer.plan.to_json())["buckets"]


def test_a_model_with_a_custom_scheme_is_loaded(tmp_path):
    model = models.mlp()
    model.compile(_sgd(RULES), models.LOSS)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert again.policy == model.optimizer.policy
    (_, policy), _ = again.policy.rules
    assert type(policy.scheme) is AllReduce
    assert type(policy.scheme.small) is tp.schemes.AllReduce


def test_the_class_determines_the_name_of_a_scheme():
    assert (str(Gathered()), str(AllReduce(without=(1,)))) == (
        "gathered",
        "allreduce(without=(1,))",
    )


def test_schemes_without_comparable_options_are_refused():
    class Slower(Gathered):
        """Adds an attribute that is not an option."""

    assert str(_sgd(Slower(without=(1,))).policy) == "slower(without=(1,))"

    class Plain(Gathered):
        def __init__(self, without):
            object.__setattr__(self, "without", without)

    for given in ([("kernel", Plain((1,)))], lambda: tp.policies.Uniform(Plain((1,)))):
        with pytest.raises(
            ValueError,
            match=r"must be a frozen dataclass.*Received: scheme=.*\. Put @dataclasses\.dataclass\("
            r"frozen=True, kw_only=True\) before the class Plain\.",
        ):
            _sgd(given() if callable(given) else given)
    with pytest.raises(
        ValueError, match=r"of a custom subclass.*Received: scheme=<class '.*Gathered'>"
    ):
        _sgd(Gathered)


@pytest.mark.ranks("2")
def test_a_custom_scheme_trains_like_one_process(wire):
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    reference = train_alone(models.copy(models.mlp, start), data, sgd())
    for scheme in (Gathered(), [("kernel", Gathered()), (".*", "ps")]):
        optimizer = tp.DistributedOptimizer(sgd(), scheme=scheme)
        weights = train_together(models.copy(models.mlp, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
        kernels = [b for b in optimizer.plan.buckets if "kernel" in b.descriptions[0].path]
        assert {bucket.scheme for bucket in kernels} == {Gathered()}
        # Each kernel is sent to the one other rank.
        assert sum(bucket.cost(wire.topology).bytes for bucket in kernels) == sum(
            bucket.bytes for bucket in kernels
        )


@pytest.mark.ranks("2")
def test_ranks_compare_the_options_of_a_custom_scheme(wire):
    weight = keras.Variable(np.zeros(20, "float32"), name="weight")
    optimizer = _sgd(Gathered(without=(wire.topology.rank,)))
    with Raises(RuntimeError, r"Gathered\(without=\(0,\).*Gathered\(without=\(1,\)"):
        optimizer.apply([tf.ones(20)], [weight])


def test_the_time_of_a_custom_scheme_is_predicted():
    """According to its stages, two ranks gather with half as many messages as a ring."""
    topology, links = (
        tp.schemes.Topology.regular(0, 2, 1),
        tp.NetworkProfile.of("1gbit", ranks_per_node=1),
    )
    own, ours = (
        exchange_seconds(scheme, MOST, 4, [], topology, links) for scheme in (Gathered(), RING)
    )
    assert 0 < own < ours
