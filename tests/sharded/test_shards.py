"""Tests shards: their state on other ranks, a single rank, and refused settings."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.training import adam, check_equal, sgd, train_alone
from tests.in_process import Cluster, InProcessWire
from tests.state.resuming import fit_with_checkpoint, sharded_adam
from tests.state.test_rank_state import LAYOUTS
from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.plan import make_plan
from tfposeidon.gradients import describe
from tfposeidon.policies import Uniform
from tfposeidon.sharded.scheme import Sharded
from tfposeidon.sharded.shards import Shard, Shards
from tfposeidon.state.placement import redistribute
from tfposeidon.state.snapshots import SnapshotError

SERVED = tp.schemes.ParameterServer()
SHAPES = [(30, 10), (7,), (8, 8), (501,)]


def _shards(nodes, rank, variables, bucket_bytes):
    plan = make_plan(
        [describe(v) for v in variables],
        Sharded(Uniform(SERVED)),
        Topology(rank, nodes),
        bucket_bytes,
    )
    shards = Shards(Exchanger(plan, InProcessWire(Cluster(nodes), rank)), variables)
    shards.build(keras.optimizers.Adam())
    return shards


def test_layer_wise_optimizers_exclude_shards_by_their_whole_variables():
    kernel = keras.Variable(np.ones((4, 3), "float32"), name="kernel")
    bias = keras.Variable(np.ones(3, "float32"), name="bias")
    optimizer = tp.optimizers.LARS(1.0)
    optimizer.build([Shard(kernel, 6), Shard(bias, 2)])
    assert optimizer.excluded == [1]


def _everybody(layout, variables, bucket_bytes):
    nodes = LAYOUTS[layout]
    return [
        _shards(nodes, rank, variables, bucket_bytes) for rank in range(Topology(0, nodes).size)
    ]


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_each_element_of_the_state_is_on_one_rank_in_any_layout(before, after):
    variables = [
        keras.Variable(np.zeros(shape), name=f"weight_{i}") for i, shape in enumerate(SHAPES)
    ]
    generator = np.random.default_rng(0)
    whole = {
        (name, v.path): generator.normal(size=v.shape)
        for v in variables
        for name in ("momentum", "velocity")
    }
    saved = []
    for shards in _everybody(before, variables, 1600):
        pieces = [(piece, variable) for variable, piece in shards.rank_state]
        saved.append(
            [(p, _part(whole[p.name, p.members[0][0]], p.offset, v.shape[0])) for p, v in pieces]
        )
    # The buckets differ, too, but shards depend only on the variables.
    covered = {key: np.zeros(array.size) for key, array in whole.items()}
    for shards in _everybody(after, variables, 400):
        wanted = [(piece, variable.numpy()) for variable, piece in shards.rank_state]
        for (piece, _), array in zip(wanted, redistribute(saved, wanted), strict=True):
            key = piece.name, piece.members[0][0]
            covered[key][piece.offset :][: array.size] += 1
            np.testing.assert_allclose(
                array, _part(whole[key], piece.offset, array.size), rtol=1e-6
            )
    assert all((times == 1).all() for times in covered.values())


def _part(array, offset, length):
    """Returns a part of an array; ranks that own no part of a variable receive a single zero."""
    return np.append(array.reshape(-1), 0.0)[offset : offset + length]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_owners_hold_equal_shares(layout):
    variables = [
        keras.Variable(np.zeros((400, 100)), name="kernel"),
        keras.Variable(np.zeros(100), name="bias"),
    ]
    held = [
        sum(v.shape[0] for v, p in shards.rank_state if p.offset < p.members[0][1])
        for shards in _everybody(layout, variables, 2**20)
    ]
    nodes = LAYOUTS[layout]
    positions = min(map(len, nodes))
    share = 2 * 40_100 / (len(nodes) * positions)
    # Shares differ by at most one value per level, state variable and bucket. Ranks without a
    # counterpart on each node own no shard.
    assert all(n == 0 or abs(n - share) <= 8 for n in held), held
    assert sum(n > 0 for n in held) == len(nodes) * positions


@pytest.mark.slow
def test_a_single_rank_trains_as_keras_does(tmp_path):
    data = models.mlp.data(48)
    start = models.mlp()
    for make_optimizer in (sgd, adam, lambda: keras.optimizers.SGD(0.5, clipnorm=0.05)):
        reference = train_alone(models.copy(models.mlp, start), data, make_optimizer(), epochs=2)
        model = models.copy(models.mlp, start)
        model.compile(optimizer=tp.ShardedOptimizer(make_optimizer(), SERVED), loss=models.LOSS)
        model.fit(*data, batch_size=12, shuffle=False, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        loaded.fit(*data, batch_size=12, shuffle=False, verbose=0)
        check_equal(loaded.get_weights(), reference)


def test_variables_of_tensorflow_are_sharded():
    with tf.name_scope("layer"):
        weight, inner = tf.Variable(tf.ones([4, 5]), name="weight"), keras.optimizers.Adam(0.1)
    optimizer = tp.ShardedOptimizer(inner, SERVED)
    tf.function(lambda: optimizer.apply([tf.ones([4, 5])], [weight]))()
    np.testing.assert_allclose(weight.numpy(), 0.9, atol=1e-5)
    assert [piece.members for _, piece in optimizer.rank_state] == [(("layer/weight:0", 20),)] * 2
    assert "layer_weight_0_momentum" in inner.variables[2].path


def test_state_is_saved_in_its_own_dtype():
    optimizer = tp.ShardedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), SERVED)
    weight = keras.Variable(np.zeros(3), dtype="float64", name="weight")
    optimizer.apply([tf.constant([1 / 3, 1e-30, 2.0], tf.float64)], [weight])
    store = {}
    optimizer.inner_optimizer.save_own_variables(store)
    np.testing.assert_array_equal(store["2"], weight.numpy())


def test_a_checkpoint_with_sharded_state_is_refused_without_shards(tmp_path):
    fit_with_checkpoint(sharded_adam, tmp_path, epochs=1)
    model = models.mlp()
    model.compile(optimizer=tp.DistributedOptimizer(adam(), scheme="ps"), loss=models.LOSS)
    with pytest.raises(SnapshotError, match="must match the model and its optimizers"):
        model.fit(*models.mlp.data(8), verbose=0, callbacks=[keras_callbacks.Checkpoint(tmp_path)])


class _Elementwise(keras.optimizers.Lamb):
    updates_elementwise = True


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.Lamb, keras.optimizers.Adafactor, keras.optimizers.Muon]
)
def test_optimizers_that_need_whole_variables_are_refused(optimizer):
    message = (
        f"parts of variables: SGD, .*Received: {optimizer.__name__}, .*Use DistributedOptimizer"
    )
    with pytest.raises(ValueError, match=message):
        tp.ShardedOptimizer(optimizer(), SERVED)
    tp.DistributedOptimizer(optimizer(), scheme="ps")
    tp.ShardedOptimizer(_Elementwise(), SERVED)


def test_elementwise_optimizers_are_accepted():
    names = "SGD RMSprop Adagrad Adadelta Adam AdamW Adamax Nadam Ftrl Lion"
    for name in names.split():
        tp.ShardedOptimizer(getattr(keras.optimizers, name)(), SERVED)


def test_schemes_that_depend_on_the_first_step_are_refused():
    for other, why in (
        ("hybcomm", "which depends on the graph of the first step"),
        ("auto", "which depends on the predicted step"),
    ):
        with pytest.raises(ValueError, match=f"known before the first step.*{why}"):
            tp.ShardedOptimizer(sgd(), [("kernel", "ps"), (".*", other)])
    weight = keras.Variable(np.zeros(3), name="weight")
    for scheme in ("allreduce", [("kernel", "ps")]):
        with pytest.raises(ValueError, match=r"must send some variables by .*'weight'"):
            tp.ShardedOptimizer(sgd(), scheme).build([weight])
