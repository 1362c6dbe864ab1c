"""LARS and LAMB on several ranks: as one process on the whole batch, whoever takes the norms."""

import keras
import numpy as np

import tfposeidon as tp
from tests.on_ranks import models
from tests.on_ranks.models import same_on_all_ranks
from tests.on_ranks.optimizer_features import SERVED
from tests.on_ranks.training import BATCH, check_equal, train_alone, train_together
from tfposeidon.optimizers import LAMB, LARS

WAYS = [("asa", True), ("allreduce", False), (SERVED, "auto")]
"""Schemes, and what `parallel` is."""
STEPS = 6


def lars(**options):
    return LARS(2.0, trust_coefficient=0.02, weight_decay=0.01, **options)


def lamb(**options):
    return LAMB(0.01, epsilon=1e-3, weight_decay=0.01, **options)


def _compare(wire, make_optimizer, ways, build=models.mlp):
    """Trains as one process does, whoever takes the norms."""
    keras.utils.clear_session()
    data = build.data(STEPS * BATCH)
    start = build()
    reference = train_alone(models.copy(build, start), data, make_optimizer())
    for scheme, parallel in ways:
        optimizer = tp.DistributedOptimizer(make_optimizer(parallel=parallel), scheme=scheme)
        weights = train_together(models.copy(build, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
    moved = max(np.abs(a - b).max() for a, b in zip(reference, start.get_weights(), strict=True))
    assert moved > 1e-3, "nothing was learnt, so nothing was compared"


def case_lars(wire):
    _compare(wire, lars, WAYS)


def case_lars_with_the_other_ratio(wire):
    _compare(wire, lambda **options: lars(ratio="norm_of_sum", nesterov=True, **options), [("2dtar", "auto")])


def case_lamb(wire):
    _compare(wire, lamb, WAYS)


def case_convolutions(wire):
    _compare(wire, lars, [("asa", True), (SERVED, True)], models.cnn)


def case_embeddings(wire):
    _compare(wire, lamb, [("asa", True), (SERVED, False)], models.embedding)


def case_clipping_and_ema(wire):
    for options in ({"global_clipnorm": 0.1, "use_ema": True, "ema_overwrite_frequency": 3}, {"clipnorm": 0.05}):
        _compare(wire, lambda options=options, **more: lars(**options, **more), [("asa", True), (SERVED, "auto")])


def case_accumulation(wire):
    accumulated = lambda **more: lamb(gradient_accumulation_steps=2, **more)  # noqa: E731
    _compare(wire, accumulated, [("asa", True), (SERVED, "auto")])


def case_all_layers_excluded(wire):
    ways = [("asa", True), ("asa", "auto"), (SERVED, "auto")]
    _compare(wire, lambda **more: LARS(0.05, exclude=[""], **more), ways)


def case_mixed_precision_with_an_overflow(wire):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = models.mlp.data(4 * BATCH)
    # The first loss scale is too large for these.
    x = 300 * x
    for scheme, parallel in (("asa", True), (SERVED, "auto")):
        model = models.mlp()
        model.compile(optimizer=tp.DistributedOptimizer(lars(parallel=parallel), scheme=scheme), loss=models.LOSS)
        before = model.get_weights()
        share = models.share((x, y), BATCH, wire.topology)
        model.fit(*share, batch_size=BATCH // wire.topology.size, epochs=4, verbose=0, shuffle=False)
        same_on_all_ranks(model.get_weights(), wire)
        assert all(np.isfinite(w).all() for w in model.get_weights())
        assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def case_the_plan_says_who_takes_norms(wire):
    for scheme, parallel, words in (
        ("asa", True, "norms of 3 layers: each rank a share (parallel=True)"),
        ("asa", False, "norms of 3 layers: all on every rank (parallel=False)"),
        ("asa", "auto", "(measured once: "),
        (SERVED, "auto", "norms of layers: of the servers' parts, their squares are summed over the ranks"),
    ):
        optimizer = tp.DistributedOptimizer(lars(parallel=parallel), scheme=scheme)
        train_together(models.mlp(), models.mlp.data(BATCH), optimizer, wire)
        notes = [note for note in optimizer.plan.notes if words in note]
        assert len(notes) == 1, optimizer.plan.notes
        same_on_all_ranks([np.frombuffer(notes[0].encode(), np.uint8)], wire)
