"""Tests network profiles: files, rates and presets, and invalid values."""

import dataclasses
import json

import pytest

from tfposeidon.communication.network_profile import (
    CPU,
    HEADERS,
    Link,
    NetworkProfile,
    Rates,
    parse_network,
)
from tfposeidon.communication.topology import Topology

LINK = Link(latency_s=1e-4, bytes_per_s=1e8)
GIVEN = NetworkProfile.of("1gbit", ranks_per_node=2, flow="200mbit")


def test_profile_files_hold_all_fields(tmp_path):
    links = dataclasses.replace(GIVEN, measured_at="2026-11-23T15:00:00")
    path = tmp_path / "links.json"
    path.write_text(links.to_json())
    assert _parsed(path, 2) == links
    alone = dataclasses.replace(GIVEN, across=None)
    assert NetworkProfile.from_json(alone.to_json(), "x") == alone


def test_init_accepts_profiles_rates_and_paths(tmp_path):
    topology = Topology.regular(0, 4, 2)
    assert parse_network(GIVEN, topology, "cpu") is GIVEN
    assert parse_network("1gbit", topology, "v100") == NetworkProfile.of(
        "1gbit", ranks_per_node=2, device="v100"
    )
    path = tmp_path / "links.json"
    path.write_text(GIVEN.to_json())
    assert (
        parse_network(path, topology, "cpu") == parse_network(str(path), topology, "cpu") == GIVEN
    )


def test_rates_exclude_packet_headers():
    assert GIVEN.across.bytes_per_s == pytest.approx(1e9 / 8 / HEADERS)
    assert GIVEN.across.seconds(GIVEN.across.bytes_per_s) == pytest.approx(1.0)
    assert str(GIVEN) == "1 Gb/s across nodes (200 Mb/s per connection), cpu, specified"


def test_the_connection_limit_applies_to_the_bytes_of_one_connection():
    link = Link(latency_s=0, bytes_per_s=10.0, flow_bytes_per_s=2.0)
    assert link.seconds(40.0, flow_bytes=8.0) == 4.0
    assert link.seconds(40.0, flow_bytes=40.0) == 20.0
    assert LINK.seconds(1e8, flow_bytes=1e8) == 1.0


def test_seconds_are_inversely_proportional_to_the_rate():
    fast = Link(latency_s=0, bytes_per_s=10 * LINK.bytes_per_s)
    assert fast.seconds(12345.0) == pytest.approx(LINK.seconds(12345.0) / 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency_s=-1, bytes_per_s=1e8), "`latency_s` must be a finite number >= 0"),
        (lambda: Link(latency_s=0, bytes_per_s=0), "`bytes_per_s` must be a finite number > 0"),
        (
            lambda: Link(latency_s=0, bytes_per_s=1e8, flow_bytes_per_s=2e8),
            "cannot carry more than its link. Received: flow_bytes_per_s=2e.08",
        ),
        (
            lambda: NetworkProfile.of("25", ranks_per_node=1),
            "string with a unit. Received: '25'. Write",
        ),
        (
            lambda: NetworkProfile.of(25, ranks_per_node=1),
            "string with a unit. Received: 25. Write",
        ),
        (
            lambda: NetworkProfile.of("25gbit", ranks_per_node=1, device="tpu"),
            "`device` must be one of cpu, v100. Received: device='tpu'",
        ),
        (
            lambda: dataclasses.replace(GIVEN, node=None, across=None),
            "must hold `node` or `across`. Received: neither",
        ),
        (lambda: dataclasses.replace(CPU, sum_s=-1.0), "`sum_s` must be a finite number >= 0"),
        (
            lambda: NetworkProfile.from_json("{", "f"),
            "must hold the output of `NetworkProfile.to_json`. Received: f: ",
        ),
        (lambda: NetworkProfile.from_json("[]", "f"), "`format` is not 1"),
        (lambda: _parsed(25), '`network` must be "measure", "unknown", a rate such as "25gbit"'),
        (lambda: _parsed("25"), "A rate must be a string with a unit. Received: '25'"),
        (lambda: _parsed("0gbit"), "A rate must be between 8kbit and 1tbit"),
        (lambda: _parsed(GIVEN), "must have the job's number of ranks per node"),
        (lambda: NetworkProfile.from_json(_without("rates"), "f"), "'rates'"),
        (lambda: NetworkProfile.from_json(_without("collective_s"), "f"), "collective_s"),
        (lambda: NetworkProfile.from_json(_with(speed=1), "f"), "speed"),
        (
            lambda: GIVEN.check_fits(Topology.regular(0, 4, 1)),
            "a profile for 2 ranks per node, and a job .*Measure the profile with 1 ranks per node",
        ),
        (
            lambda: dataclasses.replace(GIVEN, node=None).check_fits(Topology.regular(0, 4, 2)),
            "requires a network profile with `node`. Received: node=None",
        ),
        (
            lambda: dataclasses.replace(GIVEN, across=None).check_fits(Topology.regular(0, 4, 2)),
            "profile with `across`. Received: across=None, for .*with several nodes",
        ),
    ],
)
def test_invalid_network_profiles_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _without(name):
    return json.dumps({k: v for k, v in json.loads(GIVEN.to_json()).items() if k != name})


def _with(**more):
    return json.dumps(json.loads(GIVEN.to_json()) | more)


def test_profiles_of_two_nodes_apply_to_more_nodes():
    GIVEN.check_fits(Topology.regular(0, 2, 2))
    GIVEN.check_fits(Topology.regular(0, 64, 2))
    assert isinstance(GIVEN.rates, Rates)


def _parsed(given, ranks_per_node=1):
    return parse_network(given, Topology.regular(0, 4, ranks_per_node), "cpu")


def test_unreadable_profile_files_are_named(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in ("nowhere.json", tmp_path, binary):
        with pytest.raises(ValueError, match=r"a rate such as .*check --network") as caught:
            _parsed(path)
        assert f"Received: {str(path)!r}" in str(caught.value)


def test_profiles_of_another_device_are_refused():
    measured = dataclasses.replace(GIVEN, ranks_per_node=1, measured_at="2026-11-24T22:00:00+00:00")
    assert _parsed(measured) is measured
    with pytest.raises(
        ValueError, match=r"measured on gpu, for a job on CPUs. Measure the network on the devices"
    ):
        _parsed(dataclasses.replace(measured, device="gpu"))
