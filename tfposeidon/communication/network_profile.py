"""Describes the network of a job and the compute times of its ranks, to predict step times."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfposeidon import checks
from tfposeidon.communication.topology import Topology
from tfposeidon.config import Configured
from tfposeidon.text import NUMBER_AND_UNIT, parse_rate, readable_rate

FORMAT = 1
HEADERS = 1514 / 1448
"""Ratio of sent bytes to payload bytes, for TCP segments in Ethernet frames."""


@dataclass(frozen=True, kw_only=True)
class Link(Configured):
    """Latency and bandwidth between a node and the others, or between the ranks of one node.

    Args:
      latency_s: Latency of one message from rank to rank, in seconds.
      bytes_per_s: Payload bytes per second in one direction. Across nodes, this is the bandwidth of
        a whole node while all its ranks send; within a node, the bandwidth of one rank.
      flow_bytes_per_s: Payload bytes per second of a single connection; `None` (default) if one
        connection can use the whole bandwidth.

    Raises:
      ValueError: If a number is out of its range, or `flow_bytes_per_s` exceeds `bytes_per_s`.

    Example:
      >>> import tfposeidon as tp
      >>> link = tp.Link(latency_s=3e-5, bytes_per_s=3e9, flow_bytes_per_s=6e8)
      >>> link.seconds(3e9, flow_bytes=3e9)
      5.0
    """

    latency_s: float
    bytes_per_s: float
    flow_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        checks.check_number("latency_s", self.latency_s, checks.NOT_NEGATIVE)
        remedy = "Pass the payload bandwidth in bytes per second."
        checks.check_number("bytes_per_s", self.bytes_per_s, checks.POSITIVE, remedy)
        if self.flow_bytes_per_s is None:
            return
        checks.check_number("flow_bytes_per_s", self.flow_bytes_per_s, checks.POSITIVE, remedy)
        if self.flow_bytes_per_s > self.bytes_per_s:
            raise ValueError(
                "`flow_bytes_per_s` must not exceed `bytes_per_s`: one connection cannot carry "
                f"more than its link. Received: flow_bytes_per_s={self.flow_bytes_per_s:g}, "
                f"bytes_per_s={self.bytes_per_s:g}. Leave `flow_bytes_per_s` out if one "
                "connection can use the whole bandwidth."
            )

    def seconds(self, sent_bytes: float, *, flow_bytes: float = 0.0) -> float:
        """Returns the transfer time in seconds, without latency.

        `sent_bytes` is the payload of all connections, `flow_bytes` the payload of the busiest one.
        """
        whole_s = sent_bytes / self.bytes_per_s
        return max(whole_s, flow_bytes / (self.flow_bytes_per_s or self.bytes_per_s))


@dataclass(frozen=True, kw_only=True)
class Rates(Configured):
    """Compute times of a rank's CPU or GPU, while all ranks of the node are busy.

    Args:
      sum_s: Seconds per element that is added to a sum.
      encode_s: Seconds per element that is rounded to 16 bits, or converted back.
      select_s: Seconds per element of a vector whose largest elements are selected.
      pair_s: Seconds per selected pair of index and value.
      half_s: Seconds per element that Horovod adds in float16.
      operation_s: Seconds per floating-point operation of a matrix product.

    Raises:
      ValueError: If a number is negative or not finite.
    """

    sum_s: float
    encode_s: float
    select_s: float
    pair_s: float
    half_s: float
    operation_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checks.check_number(field.name, getattr(self, field.name), checks.NOT_NEGATIVE)


CPU = Rates(
    sum_s=1.6e-9, encode_s=1e-10, select_s=1.2e-9, pair_s=5.5e-9, half_s=5e-8, operation_s=4e-11
)
"""Rates of one AMD EPYC core per rank, from a study of a few exchanges.

They are provisional, because no command of this repository reproduces them."""
_V100 = Rates(
    sum_s=2e-11, encode_s=1e-11, select_s=1.5e-10, pair_s=2e-9, half_s=0.0, operation_s=2.5e-14
)
"""Rates of an NVIDIA V100, computed from its memory bandwidth and FLOP rate, not measured."""
_DEVICES = {
    "v100": (_V100, Link(latency_s=1e-5, bytes_per_s=1e11), 3e-5, 1.2e-3),
    "cpu": (CPU, Link(latency_s=3e-4, bytes_per_s=1.5e9), 3e-4, 3.3e-3),
}
"""Presets by device name: the rates, the link within a node, the latency between nodes in seconds,
and the seconds that a collective waits for Horovod's thread."""


@dataclass(frozen=True, kw_only=True)
class NetworkProfile(Configured):
    """Bandwidth and latency of a job's network, and compute times of its ranks.

    `NetworkProfile.of` creates a profile from a bandwidth and a preset, `from_json` from the output
    of `to_json`. All ranks must use the same profile.

    Args:
      rates: Compute times of a rank's CPU or GPU.
      collective_s: Seconds until a collective starts if Horovod's thread is idle: the thread's
        cycle time, and its negotiation with the other ranks.
      ranks_per_node: Number of ranks on each node.
      device: Device of the rates, such as "cpu" or "v100".
      node: Link between the ranks of a node; `None` (default) for nodes of one rank.
      across: Link of a node to the other nodes; `None` (default) for a single node.
      measured_at: Time of the measurement in ISO 8601 format; empty (default) if the values were
        not measured.
      uncertainty: Relative standard error of the measured bandwidth between nodes, or of the
        bandwidth of one connection if that error is larger. With a single node, it is the error of
        the bandwidth within the node. 0 (default) if the values were not measured.
      hosts: Host names of the measured nodes; empty (default) if the values were not measured.

    Raises:
      ValueError: If a number is out of its range, or both links are `None`.

    Example:
      >>> import tfposeidon as tp
      >>> links = tp.NetworkProfile.of("25gbit", ranks_per_node=8, device="v100", flow="5gbit")
      >>> print(links)
      25 Gb/s across nodes (5 Gb/s per connection), v100, specified
    """

    rates: Rates
    collective_s: float
    ranks_per_node: int
    device: str
    node: Link | None = None
    across: Link | None = None
    measured_at: str = ""
    uncertainty: float = 0.0
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("collective_s", "uncertainty"):
            checks.check_number(name, getattr(self, name), checks.NOT_NEGATIVE)
        checks.check_integer("ranks_per_node", self.ranks_per_node, 1)
        if self.node is None and self.across is None:
            raise ValueError(
                "A network profile must hold `node` or `across`. Received: neither. Pass the Link "
                "within the node, across nodes, or both; for a job of one rank, pass no profile."
            )

    @classmethod
    def of(
        cls, rate: str, *, ranks_per_node: int, device: str = "cpu", flow: str | None = None
    ) -> NetworkProfile:
        """Returns a profile with a given bandwidth between nodes and a preset for other values.

        Args:
          rate: Bandwidth of a node in one direction, with its unit, such as "25gbit".
          ranks_per_node: Number of ranks on each node.
          device: Name of a preset: "cpu" (default) or "v100".
          flow: Bandwidth of a single connection, with its unit; `None` (default) for no limit.

        Returns:
          The profile. Its payload bandwidths exclude the headers of Ethernet and TCP.

        Raises:
          ValueError: If a rate has no unit or is out of its range, or the preset is unknown.
        """
        if device not in _DEVICES:
            raise ValueError(
                f"`device` must be one of {', '.join(sorted(_DEVICES))}. Received: "
                f"device={device!r}. For other devices, run `python -m tfposeidon check --network "
                "FILE` on them."
            )
        rates, node, latency_s, collective_s = _DEVICES[device]
        return cls(
            rates=rates,
            collective_s=collective_s,
            ranks_per_node=ranks_per_node,
            device=device,
            node=node if ranks_per_node > 1 else None,
            across=Link(
                latency_s=latency_s,
                bytes_per_s=_payload_rate(rate),
                flow_bytes_per_s=None if flow is None else _payload_rate(flow),
            ),
        )

    def to_json(self) -> str:
        """Returns the profile as a JSON text, which `from_json` reads."""
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> NetworkProfile:
        """Returns a profile from the content of a file.

        Args:
          text: Result of `to_json`.
          source: Name of the file, for error messages.

        Returns:
          The profile.

        Raises:
          ValueError: If the text is not valid JSON, has another `format`, or is incomplete.
        """
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
                raise ValueError(f"`format` is not {FORMAT}")
            known = [name for name in ("node", "across") if found.get(name) is not None]
            links = {name: Link(**found[name]) for name in known}
            rates, hosts = Rates(**found["rates"]), tuple(found.get("hosts", ()))
            return cls(**found | links | {"rates": rates, "hosts": hosts})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "A network profile file must hold the output of `NetworkProfile.to_json`. "
                f"Received: {source}: {error}. Write it with `python -m tfposeidon check --network "
                "FILE`."
            ) from error

    def check_fits(self, topology: Topology) -> None:
        """Raises `ValueError` for a profile of another kind of cluster; node counts may differ."""
        per_node = max(len(node) for node in topology.nodes)
        needed = ("across", "nodes", len(topology.nodes)), ("node", "ranks per node", per_node)
        for name, kind, number in needed:
            if number > 1 and getattr(self, name) is None:
                raise ValueError(
                    f"A job with several {kind} requires a network profile with `{name}`. "
                    f"Received: {name}=None, for {topology}. Pass `{name}`, or measure the "
                    f"network with several {kind}."
                )
        if per_node != self.ranks_per_node:
            raise ValueError(
                "A network profile must have the job's number of ranks per node, because these "
                "ranks share the node's link and cores. Received: a profile for "
                f"{self.ranks_per_node} ranks per node, and a job of {topology}. Measure the "
                f"profile with {per_node} ranks per node."
            )

    def __str__(self) -> str:
        link, where = self.across or self.node, "across nodes" if self.across else "within the node"
        assert link is not None, "`__post_init__` ensures it"
        rate = f"{readable_rate_of_payload(link.bytes_per_s)} {where}"
        if flow := link.flow_bytes_per_s:
            rate += f" ({readable_rate_of_payload(flow)} per connection)"
        when = f"measured {self.measured_at}" if self.measured_at else "specified"
        known = [f"rates uncertain by {self.uncertainty:.0%}"] if self.uncertainty else []
        return ", ".join([rate, self.device, when, *known])


FORMS = (
    '`network` must be "measure", "unknown", a rate such as "25gbit", the path of a profile '
    "file, or a tfposeidon.NetworkProfile"
)


def parse_network(given: Any, topology: Topology, device: str) -> NetworkProfile:
    """Returns the profile for the argument `network` of `init`; `device` is the job's device."""
    if isinstance(given, NetworkProfile):
        profile = given
    elif isinstance(given, str) and NUMBER_AND_UNIT.fullmatch(given.strip()):
        ranks_per_node = max(len(node) for node in topology.nodes)
        profile = NetworkProfile.of(given, ranks_per_node=ranks_per_node, device=device)
    elif isinstance(given, str | os.PathLike):
        profile = NetworkProfile.from_json(_text_of(given), os.fspath(given))
    else:
        raise ValueError(f"{FORMS}. Received: network={given!r}. Omit it for the default.")
    profile.check_fits(topology)
    # Only a measured profile must match the job's device: a preset may describe another machine on
    # purpose.
    if profile.measured_at and (profile.device == "cpu") != (device == "cpu"):
        raise ValueError(
            "A network profile must be measured on the type of device that trains, because it "
            f"includes the speed of the device. Received: a profile measured on {profile.device}, "
            f"for a job on {'CPUs' if device == 'cpu' else 'GPUs'}. Measure the network on the "
            "devices of this job."
        )
    return profile


def _text_of(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{FORMS}. A profile file must be readable. Received: {os.fspath(path)!r}: {error}. "
            "Write the file with `python -m tfposeidon check --network`."
        ) from error


def _payload_rate(text: Any) -> float:
    """Returns the payload bytes per second of a bandwidth with a unit."""
    if not isinstance(text, str) or text.strip().replace(".", "").isdigit():
        raise ValueError(
            f"A rate must be a string with a unit. Received: {text!r}. Write, for example, "
            '"25gbit" (gigabits per second) or "3gbps" (gigabytes per second).'
        )
    return parse_rate(text) / 8 / HEADERS


def readable_rate_of_payload(bytes_per_s: float) -> str:
    """Formats a payload rate as the bandwidth that it requires, including headers."""
    return readable_rate(float(f"{8 * bytes_per_s * HEADERS:.3g}"))
