"""Compares predictions with synthetic measurements of exchanges and steps."""

import dataclasses
import itertools

import pytest

from benchmarks import grid, predict, predict_steps
from tfposeidon.autotune import simulation
from tfposeidon.autotune.measurement import probes_of
from tfposeidon.communication.network_profile import HEADERS, Link, NetworkProfile, Rates
from tfposeidon.text import parse_rate

LAYOUT = "2x2"
CALL_S = 1e-3
"""Seconds of a call of an empty function."""
NODE = Link(latency_s=2e-4, bytes_per_s=1e9)
RATES = Rates(
    sum_s=2e-9,
    encode_s=1e-9,
    select_s=3e-9,
    pair_s=6e-9,
    half_s=6e-8,
    operation_s=1e-11,
)
SYSTEMS = ("allreduce", "torus2d", "hitopk:0.01", "topk:0.01")


def _links(rate):
    payload = 1e10 if rate == "unshaped" else parse_rate(rate) / 8 / HEADERS
    return NetworkProfile(
        rates=RATES,
        collective_s=3e-3,
        ranks_per_node=2,
        device="cpu",
        node=NODE,
        across=Link(latency_s=3e-4, bytes_per_s=payload),
    )


def _row(seconds):
    return {"time_s": CALL_S + seconds, "scatter": 0.0, "standard_error": 0.0, "limit_s": None}


@pytest.fixture(scope="module")
def rows():
    """Returns exchanges with the times that are predicted for a known network profile."""
    topology, found = grid.topology_of(LAYOUT), {}
    for rate in ("200mbit", "1gbit", "unshaped"):
        links = _links(rate)
        for one in probes_of(topology):
            length = grid.LARGE[-1] if one.tells_rate else grid.SMALL
            key = (LAYOUT, rate, grid.collective_name(one, topology), str(length))
            sent, stays = dataclasses.replace(one, length=length).bytes_on(topology)
            link = links.node if stays else links.across
            latency_s = links.collective_s + one.steps * link.latency_s
            link_s = sent / link.bytes_per_s
            timed = dataclasses.replace(one, length=length).transfers[0]
            sums_s = RATES.half_s * simulation.float16_sums(timed)
            found[key] = _row(latency_s + max(link_s, sums_s))
        burst_s = 0.0 if rate == "unshaped" else predict.BURST_S
        for system, size in itertools.product(SYSTEMS, ("65536", "4194304")):
            found[LAYOUT, rate, system, size] = _row(
                predict.predicted(system, size, topology, links, burst_s)
            )
    work = {
        "nothing": 0.0,
        "sum": RATES.sum_s * grid.WORK,
        "encode": RATES.encode_s * grid.WORK,
        "select": RATES.select_s * grid.WORK + RATES.pair_s * grid.PAIRS[0],
        "select_many": RATES.select_s * grid.WORK + RATES.pair_s * grid.PAIRS[1],
        "multiply": (RATES.encode_s + RATES.operation_s * 2 * grid.PRODUCT_ROWS) * grid.WORK,
    }
    for kind, work_s in work.items():
        size = grid.WORK if work_s else grid.NO_WORK
        found[LAYOUT, "unshaped", f"{kind}@work", str(size)] = _row(work_s)
    return found


def test_exchanges_are_predicted_from_single_collectives(rows):
    """The fit recovers the network profile to within 3 %."""
    found = list(predict.compared(rows))
    assert len(found) == 3 * 2 * len(SYSTEMS)
    assert max(abs(predict.error(row)) for row in found) < 0.03


def test_steps_are_at_least_as_long_as_their_computation(rows, capsys):
    found = list(predict_steps.compared(rows))
    assert {row["file"] for row in found} == {"scaling", "overview", "auto"}
    assert {row["layout"] for row in found} == {LAYOUT}
    assert len(found) > 30
    for row in found:
        assert row["predicted_s"] > 0
    predict.show(found, "exposed communication", lambda row: row["shows"])
    predict.show_worst(found, 2)
    assert "exposed communication" in capsys.readouterr().out


def test_a_missing_grid_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["predict", "--results", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit):
        predict.main()
    assert "benchmarks.exchange --full" in capsys.readouterr().err


def _options(**times):
    """Returns rows of one exchange, from predicted and measured seconds by system."""
    return {
        system: {"predicted_s": predicted_s, "measured_s": measured_s}
        for system, (predicted_s, measured_s) in times.items()
    }


def test_the_choice_is_timed_as_auto_does():
    close = _options(allreduce=(1.0, 1.0), alltoall=(1.05, 0.9), ps=(2.0, 0.5))
    assert predict.chosen(close, timed_trials=False) == "allreduce"
    assert predict.chosen(close, timed_trials=True) == "alltoall"
    # A trial also times a system that is among the best after the previous trial.
    third = _options(allreduce=(1.0, 1.3), alltoall=(1.05, 1.2), ps=(1.15, 0.9))
    assert predict.chosen(third, timed_trials=True) == "ps"
    far = _options(allreduce=(1.0, 1.0), alltoall=(0.8, 1.2))
    assert predict.chosen(far, timed_trials=True) == "alltoall"
    tie = _options(allreduce=(1.0, 1.0), alltoall=(0.99, 0.99))
    assert predict.chosen(tie, timed_trials=True) == "allreduce"


def test_the_torus_is_not_a_candidate_if_it_equals_all_to_all():
    assert predict.considered(["allreduce", "torus2d:float16"], "4x1") == ["allreduce"]
    assert predict.considered(["allreduce", "torus2d:float16"], "2x2") == [
        "allreduce",
        "torus2d:float16",
    ]


def test_a_constant_is_changed_only_temporarily():
    def predicted_s():
        return predict.predicted("onebit", "65536", grid.topology_of(LAYOUT), _links("unshaped"))

    before_s = predicted_s()
    with predict.changed("CODED_PER_SELECTED", 1000):
        assert predicted_s() > before_s
    assert predicted_s() == before_s
