"""With gradient accumulation, gradients are sent densely, and the plan states the reason."""

import keras
import pytest

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.factors import KERNELS, large_table, token_batches
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import (
    BATCH,
    STEPS,
    check_equal,
    train_alone,
    train_together,
)

pytestmark = pytest.mark.ranks("2x1")

WHY = "gradients are accumulated over 2 steps"


def accumulating():
    return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)


def test_hybcomm_uses_the_parameter_server_and_trains_like_one_process(wire):
    start, data = large_table(), token_batches(STEPS * BATCH)
    reference = train_alone(models.copy(large_table, start), data, accumulating())
    optimizer = tp.DistributedOptimizer(accumulating(), scheme="hybcomm")
    weights = train_together(models.copy(large_table, start), data, optimizer, wire)
    check_equal(weights, reference)
    same_on_all_ranks(weights, wire)
    for bucket in optimizer.plan.buckets:
        assert bucket.scheme.name == "ps"
        assert {choice.reason for choice in bucket.choices} == {WHY}


def test_rules_that_require_factors_are_refused(wire):
    optimizer = tp.DistributedOptimizer(accumulating(), scheme=KERNELS)
    with pytest.raises(
        ValueError, match=f"'factors' requires gradients.*whose gradient has no factors.*{WHY}"
    ):
        train_together(models.mlp(), models.mlp.data(BATCH), optimizer, wire)
