"""Tests the numbers that `benchmarks.exchange` computes, and the exchanges of the grid."""

import argparse

import pytest

from benchmarks import (
    exchange,
    harness,
)
from benchmarks.exchanges import scheme_named
from tfposeidon import schemes


def test_fit_finds_latency_and_bandwidth():
    latency_s, bandwidth = 0.004, 2e8
    rows = [
        {"shaped_bytes": 2**p, "time_s": latency_s + 8 * 2**p / bandwidth} for p in range(10, 27)
    ]
    assert exchange.fit(rows) == pytest.approx((latency_s, bandwidth))


def test_rows_show_the_measured_time_relative_to_the_limit():
    figures = {
        "step_s": [3.0, 1.1, 1.1],
        "busiest_bytes": 25_000_000,
        "sent_bytes": 26e6,
        "predicted_bytes": 26e6,
    }
    cell = {"rate": "200mbit", "systems": {"torus2d:float16 1024": figures}}
    (row,) = exchange.rows(cell)
    assert (row["system"], row["length"], row["limit_s"]) == ("torus2d:float16", 1024, 1.0)
    assert row["distance"] == pytest.approx(1.1)
    assert row["shaped_bytes"] == 25_000_000 - 25_000
    (row,) = exchange.rows(
        cell | {"systems": {"alltoall 1024": figures | {"busiest_bytes": 2_000_000}}}
    )
    assert row["distance"] is None, "the shaper's burst exceeds 1 % of these bytes"
    (row,) = exchange.rows(cell | {"rate": "unshaped"})
    assert row["limit_s"] is None


def test_exchange_runs_other_frameworks_in_separate_jobs():
    options = argparse.Namespace(
        layouts=["4x4"],
        rates=["1gbit"],
        lengths=[10, 25_557_032],
        systems=["hitopk:0.1", "factors:4", "ddp"],
        shapes=["64x32"],
        flow=None,
        full=False,
    )
    ours, ddp = exchange.planned(options).values()
    assert ours["worker"] == "exchange"
    assert ours["cells"] == ["hitopk:0.1 1024", "hitopk:0.1 25557032", "factors:4 64x32"]
    assert (ddp["worker"], ddp["cells"]) == ("ddp", ["ddp 1024"])


def test_exchanges_resume_with_missing_results(tmp_path):
    options = argparse.Namespace(
        layouts=["2x1"],
        rates=["100mbit"],
        lengths=[10, 12],
        systems=["alltoall"],
        shapes=[],
        flow=None,
        full=False,
    )
    results = harness.Results(tmp_path / "results.json")
    ((key, job),) = exchange.planned(options, results.cells).items()
    assert job["cells"] == ["alltoall 1024", "alltoall 4096"]

    def run(**job):
        error = harness.JobError("killed")
        error.answer = {"systems": {"alltoall 1024": {}}, "layout": "2x1", "rate": "100mbit"}
        raise error

    assert harness.jobs(results, {key: job}, run) == [key]
    ((again, job),) = exchange.planned(options, results.cells).items()
    assert (again, job["cells"]) == (f"{key} part=2", ["alltoall 4096"])


def test_the_grid_has_the_largest_size_of_each_kind_within_limits():
    unshaped = list(exchange.grid("unshaped"))
    assert len(unshaped) == len(set(unshaped))
    for one in ("allreduce 67108864", "hitopk:0.001 16777216", "factors:512 4096x4096"):
        assert one in unshaped
    assert not exchange.is_within_limits("alltoall 67108864", "4x4", "unshaped")
    assert exchange.is_within_limits("alltoall 67108864", "4x2", "unshaped")
    assert not exchange.is_within_limits("alltoall 67108864", "2x1", "100mbit"), "takes over 5 s"


def test_schemes_are_named_with_their_options():
    assert scheme_named("torus2d") == schemes.Torus2D()
    assert scheme_named("torus2d:float16") == schemes.Torus2D(wire_dtype="float16")
    expected = schemes.HiTopK(density=0.001, select="exact", wire_dtype="bfloat16")
    assert scheme_named("hitopk:0.001:exact:bfloat16") == expected
