"""Each node is a replica: its ranks average gradients, and nodes synchronize weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.local_updates import (
    EVERY,
    RULES,
    SPARSE,
    STEPS,
    Reference,
    SpoilsStatistics,
    batch_norm,
    check_resumes,
    fitted,
    hidden,
    own_weights,
    sgd,
)
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects, on_one_rank
from tests.helpers.training import BATCH, check_equal

pytestmark = pytest.mark.ranks("2+1")


def _nodes_in_one_process(start, data, wire, rule, delay=0):
    """Returns global weights and the weights of each node, trained on its ranks' shares."""
    nodes, local = wire.topology.nodes, BATCH // wire.topology.size
    replicas = []
    for _ in nodes:
        replica = models.copy(models.mlp, start)
        replica.compile(sgd(), models.LOSS)
        replicas.append(replica)
    # Elastic averaging weights nodes equally; averaging weights nodes by samples.
    sizes = None if rule == "elastic" else [len(node) for node in nodes]
    reference = Reference(rule, replicas, sizes)
    sent = None
    for step in range(STEPS):
        for node, replica in zip(nodes, replicas, strict=True):
            begin, end = step * BATCH + node[0] * local, step * BATCH + (node[-1] + 1) * local
            replica.train_on_batch(*(part[begin:end] for part in data))
        if step % EVERY == EVERY - 1:
            sent = reference.sent()
        if sent is not None and (step - (EVERY - 1)) % EVERY == delay:
            reference.apply(sent)
            sent = None
    return reference.global_weights, [replica.get_weights() for replica in replicas]


@pytest.mark.ranks("2+1", "2x2")
def test_nodes_equal_replicas_in_one_process(wire):
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    sizes = {len(node) for node in wire.topology.nodes}
    # Weights by samples differ only if the sizes of nodes differ.
    for rule, delay in (("average", 2), ("elastic", 0))[: len(sizes)]:
        global_weights, nodes = on_one_rank(
            lambda rule=rule, delay=delay: _nodes_in_one_process(start, data, wire, rule, delay)
        )
        options = {"hierarchical": True, "overlap_steps": delay, "bucket_bytes": 512}
        optimizer = tp.LocalUpdates(sgd(), EVERY, RULES[rule](), **options)
        model = fitted(models.mlp, start, data, wire, optimizer)
        check_equal(model.get_weights(), global_weights)
        same_on_all_ranks(model.get_weights(), wire)
        own = own_weights(model)
        check_equal(own, nodes[wire.topology.node_index])
        digests = exchange_objects(models.digest(own), wire, "own")
        for node in wire.topology.nodes:
            assert len({digests[rank] for rank in node}) == 1
        assert len(set(digests)) == len(wire.topology.nodes)
        assert "all-reduce within the node at every step" in str(optimizer.plan)
        assert "sends per synchronization" in str(optimizer.plan)


def test_nodes_overlap_an_exchange_with_steps(wire):
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    optimizer = tp.LocalUpdates(sgd(), EVERY, hierarchical=True, overlap_steps=2, scheme="hitopk")
    optimizer.exchange.is_timed = True
    model = fitted(models.mlp, start, data, wire, optimizer, epochs=2)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.exposed_s > 0.0


DELAY = 2


def test_buckets_of_an_overlapped_exchange_do_not_change_the_bits(wire):
    """Weights are the same with one bucket and with many, which are sent one after the other."""
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    digests = []
    for bucket_bytes in (0, 1 << 20):
        # The sums of this scheme do not depend on Horovod's fusion.
        options = {"hierarchical": True, "overlap_steps": DELAY, "scheme": "torus2d"}
        optimizer = tp.LocalUpdates(sgd(), EVERY, **options, bucket_bytes=bucket_bytes)
        model = fitted(models.mlp, start, data, wire, optimizer)
        assert "waits for at most one bucket" in str(optimizer.plan)
        same_on_all_ranks(model.get_weights(), wire)
        digests.append([models.digest(model.get_weights()), models.digest(own_weights(model))])
    assert digests[0] == digests[1]


def test_nodes_resume_between_and_during_synchronizations(wire):
    def make():
        options = {"hierarchical": True, "overlap_steps": DELAY, "bucket_bytes": 0}
        return tp.LocalUpdates(sgd(), EVERY, "outer", SPARSE, **options)

    # Resume before and after the step that starts a synchronization, and one step later.
    check_resumes(wire, make, slice(EVERY - 2, EVERY + 1))


def test_ranks_of_a_node_stay_equal_after_one_exhausts_its_input(wire):
    """All ranks end an epoch of unknown length together."""
    rank = wire.topology.rank
    x, y = models.mlp.data(48)
    for options in (
        {"sync_every": 3, "overlap_steps": 1},
        {"sync_every": 1, "outer_optimizer": "elastic"},
    ):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        model = models.mlp()
        optimizer = tp.LocalUpdates(sgd(), hierarchical=True, **options)
        model.compile(optimizer, models.LOSS)
        batches = 5 if rank else 4
        data = tf.data.Dataset.from_tensor_slices((x[: 4 * batches], y[: 4 * batches])).batch(4)
        model.fit(data.filter(lambda *_: True), epochs=2, verbose=0)
        same_on_all_ranks(model.get_weights(), wire)
        digests = exchange_objects(models.digest(own_weights(model)), wire, "own")
        for node in wire.topology.nodes:
            assert len({digests[one] for one in node}) == 1
        assert all(np.isfinite(w).all() for w in model.get_weights())


def test_a_rank_without_samples_follows_its_node(wire):
    optimizer = tp.LocalUpdates(sgd(), 1, "elastic", hierarchical=True)
    weight = keras.Variable([0.0, 1.0], name="weight")
    for _ in range(3):
        rank = wire.topology.rank
        gradient = tf.fill([2], float("nan") if rank == 0 else 1.0 + rank)
        optimizer.apply([gradient], [weight], sample_count=float(rank > 0))
        optimizer.end_step()
    values = exchange_objects(weight.numpy().tolist(), wire, "own")
    assert [len({str(values[rank]) for rank in node}) for node in wire.topology.nodes] == [1, 1]
    assert np.isfinite(values).all()


def test_non_finite_statistics_keep_ranks_of_a_node_equal(wire):
    """The statistics overflow on one rank."""
    data, start = models.mlp.data(STEPS * BATCH), batch_norm()
    optimizer = tp.LocalUpdates(sgd(), EVERY, "elastic", hierarchical=True, overlap_steps=2)
    callbacks = [SpoilsStatistics()]
    model = fitted(batch_norm, start, data, wire, optimizer, callbacks=callbacks)
    same_on_all_ranks(model.get_weights(), wire)
    with hidden(model):
        assert all(np.isfinite(w).all() for w in model.get_weights())
        own = models.digest([v.numpy() for v in model.trainable_variables])
    digests = exchange_objects(own, wire, "own")
    assert [len({digests[rank] for rank in node}) for node in wire.topology.nodes] == [1, 1]
