"""Several ranks reach the weights of one process on the whole batch."""

import numpy as np
import pytest

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import (
    BATCH,
    SERVED,
    STEPS,
    adam,
    check_close,
    check_equal,
    distributed,
    sgd,
    train_alone,
    train_together,
)

pytestmark = pytest.mark.ranks("2x2", core=True)


def _compare(build, make_optimizer, wire, schemes):
    data = build.data(STEPS * BATCH)
    start = build()
    reference = train_alone(models.copy(build, start), data, make_optimizer())
    for scheme in schemes:
        optimizer = distributed(make_optimizer(), scheme=scheme, bucket_bytes=1024)
        weights = train_together(models.copy(build, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
    moved = max(np.abs(a - b).max() for a, b in zip(reference, start.get_weights(), strict=True))
    assert moved > 1e-3, "training must change the reference"


def test_an_mlp_with_sgd_equals_one_process(wire):
    _compare(models.mlp, sgd, wire, ["allreduce", "ps"])


def test_an_mlp_with_adam_equals_one_process(wire):
    _compare(models.mlp, adam, wire, [SERVED, "alltoall"])


def test_a_cnn_with_adam_equals_one_process(wire):
    _compare(models.cnn, adam, wire, ["torus2d"])


def test_attention_with_adam_equals_one_process(wire):
    _compare(models.attention, adam, wire, ["hybcomm"])


def test_an_embedding_with_sgd_equals_one_process(wire):
    _compare(models.embedding, sgd, wire, [SERVED, "hybcomm"])


def test_sixteen_bit_schemes_train_within_tolerance(wire):
    data = models.mlp.data(STEPS * BATCH)
    start = models.mlp()
    reference = train_alone(models.copy(models.mlp, start), data, sgd())
    for scheme, share in (
        (
            [
                ("kernel", tp.schemes.AllToAll(wire_dtype="float16")),
                (".*", tp.schemes.AllReduce(wire_dtype="float16")),
            ],
            2e-3,
        ),
        (tp.schemes.Torus2D(wire_dtype="bfloat16"), 0.02),
    ):
        model = models.copy(models.mlp, start)
        weights = train_together(model, data, distributed(sgd(), scheme=scheme), wire)
        same_on_all_ranks(weights, wire)
        check_close(weights, reference, start.get_weights(), share)
