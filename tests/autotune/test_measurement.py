"""Tests the number of timed rounds of a network measurement."""

import pytest

from tfposeidon.autotune import measurement


@pytest.mark.ranks("2")
def test_slow_probes_are_timed_until_their_variation_is_known(wire, monkeypatch):
    monkeypatch.setattr(measurement, "BUDGET_S", 0.0)
    names, exchange = [], measurement.exchange_objects

    def noted(values, wire, name):
        names.append(name)
        return exchange(values, wire, name)

    monkeypatch.setattr(measurement, "exchange_objects", noted)
    measurement.measure(wire)
    rounds = sum(".round_" in name for name in names)
    # The first round is not timed. If links are slow enough, no later round enlarges vectors.
    assert 1 + 2 <= rounds <= measurement.GROWING_ROUNDS + 2
