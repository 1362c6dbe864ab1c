"""In the lab, synchronizations send the bytes of the plan, and other steps send nothing."""

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tests.helpers.counting import check_carried
from tests.helpers.models import same_on_all_ranks

pytestmark = pytest.mark.ranks("2x2", lab="--inter 200mbit")

EVERY, ROUNDS, BETWEEN, LATE = 8, 2, 3, 5
WIDTH = 1400
"""Side of the kernel, whose size is 8 MB. Horovod's control messages have 0.3 MB per second."""
TALK = 200_000
"""Bytes of the messages by which ranks agree on collectives, within nodes in every step."""
OPTIONS = {
    "dense": {},
    "16 bits, late": {"scheme": tp.schemes.AllToAll(wire_dtype="float16"), "overlap_steps": LATE},
    "a tenth": {"scheme": tp.schemes.TopK(density=0.1, min_elements=0)},
    "a tenth, of nodes": {
        "scheme": tp.schemes.HiTopK(density=0.1, min_elements=0),
        "hierarchical": True,
    },
}


def test_bytes_of_steps_equal_those_of_their_synchronizations(wire):
    x = np.random.default_rng(wire.topology.rank).normal(size=(4, WIDTH)).astype("float32")
    for name, options in OPTIONS.items():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
        optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.01), EVERY, **options)
        model.compile(optimizer, "mse")

        def steps(count, model=model):
            for _ in range(count):
                model.train_on_batch(x, x)

        # After these steps, all graphs are traced, and no exchange is pending at the start or end
        # of counting.
        steps(2 * EVERY + LATE)
        node = [wire.topology.seen_from(rank) for rank in wire.topology.node.ranks]
        of_round = sum(
            bucket.cost(rank).cross_bytes for bucket in optimizer.plan.buckets for rank in node
        )
        many, few = (
            check_carried(lambda n=n: steps(n), "eth0", wire, rounds * of_round, name, TALK)
            for n, rounds in ((ROUNDS * EVERY, ROUNDS), (BETWEEN, 0))
        )
        if wire.topology.rank == 0:
            print(
                f"{name}: {many / 1000:.0f} kB in {ROUNDS} rounds, {few / 1000:.0f} kB between, "
                f"{ROUNDS} x {of_round / 1000:.0f} kB by the plan",
                flush=True,
            )
        with optimizer.global_weights():
            same_on_all_ranks(model.get_weights(), wire)
