"""Simulated steps follow laws that hold for any times."""

import itertools
import random

import pytest

from tfposeidon.autotune.simulation import (
    FUSION_BYTES,
    FUSION_THRESHOLD,
    StageTime,
    Timeline,
    fusion_bytes_of,
    simulate,
)

CYCLE_S = 0.01


def _ring(load_s, latency_s=0.002, size_bytes=1e6):
    return StageTime(
        operation="all_reduce",
        fuses_with=(4, 0, 1),
        latency_s=latency_s,
        load_s=load_s,
        size_bytes=size_bytes,
    )


def _scatter(load_s, latency_s=0.002):
    return StageTime(operation="all_to_all", latency_s=latency_s, load_s=load_s, size_bytes=1e6)


def _work(load_s):
    return StageTime(operation=None, load_s=load_s)


def _seconds(stages):
    return sum(stage.latency_s + stage.load_s for stage in stages)


def _random_chains(seed):
    rng = random.Random(seed)
    make = (_ring, _scatter, _work)
    return [
        [rng.choice(make)(rng.uniform(0, 0.1)) for _ in range(rng.randint(1, 5))]
        for _ in range(rng.randint(1, 12))
    ]


@pytest.mark.parametrize("seed", range(50))
def test_a_step_is_bounded_by_its_parts_and_their_sum(seed):
    chains = _random_chains(seed)
    ready = [0.05 * (i + 1) for i in range(len(chains))]
    compute = ready[-1]
    found = simulate(chains, ready, compute, CYCLE_S)
    stages = list(itertools.chain(*chains))
    transfers = [s for s in stages if s.operation is not None]
    assert found >= compute
    assert found >= sum(s.load_s for s in transfers)
    assert found >= sum(s.load_s for s in stages if s.operation is None)
    whole = _seconds(stages) + CYCLE_S * len(transfers)
    assert found <= compute + whole + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_a_free_exchange_takes_only_the_computation(seed):
    chains = [[StageTime(operation="all_to_all")] * 3 for _ in _random_chains(seed)]
    ready = [0.1 * i for i in range(len(chains))]
    found = simulate(chains, ready, 5.0, 0.0)
    assert found == 5.0


def test_an_exchange_after_the_computation_adds_its_whole_time():
    chain = [_scatter(0.03), _work(0.02), _scatter(0.01)]
    found = simulate([chain], [1.0], 1.0, CYCLE_S)
    assert found == pytest.approx(1.0 + _seconds(chain) + 2 * CYCLE_S)


def test_all_reduces_of_a_cycle_are_fused_and_others_are_not():
    rings = simulate([[_ring(0.01)], [_ring(0.01)]], [0.0, 0.0], 0.0, CYCLE_S)
    assert rings == pytest.approx(CYCLE_S + 0.002 + 0.02)
    scatters = simulate([[_scatter(0.01)], [_scatter(0.01)]], [0.0, 0.0], 0.0, CYCLE_S)
    # Both scatters share one negotiation, but each has its own latency.
    assert scatters == pytest.approx(CYCLE_S + 2 * 0.002 + 0.02)
    large = [[_ring(0.01, size_bytes=0.6 * FUSION_BYTES)]] * 2
    assert simulate(large, [0.0, 0.0], 0.0, CYCLE_S) == pytest.approx(scatters)
    small = [[_ring(0.01, size_bytes=600)]] * 2
    one_by_one = simulate(small, [0.0, 0.0], 0.0, CYCLE_S, fusion_bytes=1000)
    assert one_by_one == pytest.approx(scatters)


def test_horovods_environment_variable_limits_fusion():
    assert fusion_bytes_of({}) == FUSION_BYTES
    assert fusion_bytes_of({FUSION_THRESHOLD: "8388608"}) == 2**23
    with pytest.raises(ValueError, match=r"must be a number of bytes\. Received: '64MB'"):
        fusion_bytes_of({FUSION_THRESHOLD: "64MB"})


def test_small_all_to_alls_cost_more_than_one_ring():
    """Horovod fuses the rings of small buckets, so many rings take hardly longer than one."""
    many = [[_ring(0.0001)] for _ in range(50)]
    store = [[_scatter(0.00005), _scatter(0.00005)] for _ in range(50)]
    ready = [0.0] * 50
    assert simulate(many, ready, 0.0, 0.003) < simulate(store, ready, 0.0, 0.003) / 5


def test_local_work_overlaps_collectives_and_shares_the_processor():
    chains = [[_work(0.1)], [_work(0.1)], [_scatter(0.15, latency_s=0.0)]]
    assert simulate(chains, [0.0] * 3, 0.0, 0.0) == pytest.approx(0.2)


def test_an_even_timeline_has_the_last_variable_first():
    line = Timeline.even(variables=4, first_s=1.0, compute_s=2.5)
    assert line.ready_s == (2.5, 2.0, 1.5, 1.0)
    assert Timeline.even(variables=1, first_s=1.0, compute_s=2.0).ready_s == (1.0,)
