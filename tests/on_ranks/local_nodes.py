"""Nodes that train by themselves: gradients are averaged in the node, and nodes meet in rounds."""

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from tests.on_ranks import models
from tests.on_ranks.local_updates import (
    EVERY,
    RULES,
    STEPS,
    Reference,
    check_resumes,
    fitted,
    own_weights,
    sgd,
)
from tests.on_ranks.models import same_on_all_ranks
from tests.on_ranks.training import BATCH, check_equal
from tfposeidon.communication.wire import exchange_objects


def _nodes_in_one_process(start, data, wire, rule):
    """A replica for each node, which trains on the shares of all its ranks."""
    nodes, local = wire.topology.nodes, BATCH // wire.topology.size
    replicas = []
    for _ in nodes:
        replica = models.copy(models.mlp, start)
        replica.compile(sgd(), models.LOSS)
        replicas.append(replica)
    # Elastic averaging weighs nodes alike, averaging weighs their samples.
    sizes = None if rule == "elastic" else [len(node) for node in nodes]
    reference = Reference(rule, replicas, sizes)
    for step in range(STEPS):
        for node, replica in zip(nodes, replicas, strict=True):
            begin, end = step * BATCH + node[0] * local, step * BATCH + (node[-1] + 1) * local
            replica.train_on_batch(*(part[begin:end] for part in data))
        if step % EVERY == EVERY - 1:
            reference.settle(reference.sent())
    return reference


def case_nodes_equal_replicas_in_one_process(wire):
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    for rule in ("average", "elastic"):
        reference = _nodes_in_one_process(start, data, wire, rule)
        optimizer = tp.LocalUpdates(sgd(), EVERY, RULES[rule](), within="node")
        model = fitted(models.mlp, start, data, wire, optimizer)
        check_equal(model.get_weights(), reference.centre)
        same_on_all_ranks(model.get_weights(), wire)
        own = own_weights(model)
        check_equal(own, reference.replicas[wire.topology.node_index].get_weights())
        digests = exchange_objects(models.digest(own), wire, "own")
        for node in wire.topology.nodes:
            assert len({digests[rank] for rank in node}) == 1
        assert len(set(digests)) == len(wire.topology.nodes)
        assert "all-reduce in the node at every step" in str(optimizer.plan)


def case_nodes_are_resumed(wire):
    """In the middle of a round, and with an exchange under way."""

    def make():
        return tp.LocalUpdates(sgd(), EVERY, "outer", "onebit", within="node", delay=1)

    check_resumes(wire, make, slice(1, 6, 2))


def case_a_late_exchange_of_nodes(wire):
    data, start = models.mlp.data(STEPS * BATCH), models.mlp()
    optimizer = tp.LocalUpdates(sgd(), EVERY, within="node", delay=2, scheme="hitopk")
    model = fitted(models.mlp, start, data, wire, optimizer, epochs=2)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.exposed_s >= 0.0


def case_a_rank_of_a_node_out_of_data(wire):
    """All ranks end an epoch of unknown length together, and those of a node stay equal."""
    rank = wire.topology.rank
    x, y = models.mlp.data(48)
    for delay in (0, 1):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        model = models.mlp()
        optimizer = tp.LocalUpdates(sgd(), every=3, within="node", delay=delay)
        model.compile(optimizer, models.LOSS)
        batches = 5 if rank else 4
        data = tf.data.Dataset.from_tensor_slices((x[: 4 * batches], y[: 4 * batches])).batch(4)
        model.fit(data.filter(lambda *_: True), epochs=2, verbose=0)
        same_on_all_ranks(model.get_weights(), wire)
        digests = exchange_objects(models.digest(own_weights(model)), wire, "own")
        for node in wire.topology.nodes:
            assert len({digests[one] for one in node}) == 1
        assert all(np.isfinite(w).all() for w in model.get_weights())
