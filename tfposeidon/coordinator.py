"""The coordinator: descriptions + topology + policy -> plan. It is pure; nothing is sent here."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tfposeidon.cost import Cost
from tfposeidon.gradient import Description
from tfposeidon.policies import Choice, Policy
from tfposeidon.schemes import AllReduce, FactorScheme, Scheme, ShardedServer, VectorScheme
from tfposeidon.schemes.base import Slot
from tfposeidon.text import readable, table
from tfposeidon.topology import Topology

DEFAULT_BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are sent as one vector, in the order of their variables' reversed list.

    Attributes:
      members: Places of the variables in the list that the plan was made for.
      descriptions: Their descriptions, in the same order; all of one dtype.
      scheme: How the bucket is exchanged.
      reason: Why.
      candidates: Bytes that a node sends and receives by each scheme that was weighed, by name.
    """

    members: tuple[int, ...]
    descriptions: tuple[Description, ...]
    scheme: Scheme
    reason: str
    candidates: tuple[tuple[str, float], ...] = ()

    @property
    def length(self) -> int:
        return sum(d.length for d in self.descriptions)

    @property
    def bytes(self) -> int:
        return sum(d.bytes for d in self.descriptions)

    def joined(self, other: Bucket) -> Bucket:
        """Both in one, this one's variables first."""
        members, descriptions = self.members + other.members, self.descriptions + other.descriptions
        return dataclasses.replace(self, members=members, descriptions=descriptions, candidates=())

    @property
    def dtype(self) -> str:
        return self.descriptions[0].dtype

    @property
    def goes_alone(self) -> bool:
        """Whether no other variable may share it."""
        return isinstance(self.scheme, FactorScheme)

    @property
    def server(self) -> ShardedServer | None:
        """The scheme, if it is servers that update the variables, and not every rank."""
        return self.scheme if isinstance(self.scheme, ShardedServer) and self.scheme.update == "server" else None

    def served_parts(self, topology: Topology) -> tuple[tuple[int, int], ...]:
        """Begin and end of what `topology.rank` serves of each member, in elements; (0, 0) for nothing."""
        assert self.server is not None
        begin, end = self.server.own_range(self.length, topology)
        starts = itertools.accumulate((d.length for d in self.descriptions), initial=0)
        parts = [
            (max(begin - start, 0), min(end - start, d.length))
            for start, d in zip(starts, self.descriptions, strict=False)
        ]
        return tuple((first, last) if first < last else (0, 0) for first, last in parts)

    def slots(self, topology: Topology) -> tuple[Slot, ...]:
        """What the scheme keeps for it from step to step, on `topology.rank`."""
        return self.scheme.slots(self.length, topology)

    def cost(self, topology: Topology) -> Cost:
        if isinstance(self.scheme, FactorScheme):
            factors = self.descriptions[0].factors
            return self.scheme.factor_cost(factors, topology) if factors else Cost()
        assert isinstance(self.scheme, VectorScheme)
        return self.scheme.cost(self.length, self.descriptions[0].itemsize, topology)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which variable goes by which scheme, with bytes and reason. `print` it, or take `to_json()`.

    Attributes:
      buckets: In the order in which their gradients appear in the backward pass.
      topology: What the plan was made for.
      notes: What is done in another way than one might expect, and why.
    """

    buckets: tuple[Bucket, ...]
    topology: Topology
    notes: tuple[str, ...] = ()

    @cached_property
    def cost(self) -> Cost:
        """All buckets together, as this rank sends them."""
        return sum((bucket.cost(self.topology) for bucket in self.buckets), Cost())

    def to_json(self) -> str:
        """The plan for machines: topology, buckets with variables, scheme, bytes and reason, notes."""
        buckets = [self._bucket_to_dict(bucket) for bucket in self.buckets]
        content = {"nodes": self.topology.nodes, "rank": self.topology.rank, "buckets": buckets, "notes": self.notes}
        return json.dumps(content, indent=2)

    def _bucket_to_dict(self, bucket: Bucket) -> dict[str, Any]:
        return {
            "scheme": bucket.scheme.name,
            "options": bucket.scheme.get_config(),
            "reason": bucket.reason,
            "candidates": dict(bucket.candidates),
            "dtype": bucket.dtype,
            "variables": [{"path": d.path, "shape": d.shape} for d in bucket.descriptions],
            "cost": dataclasses.asdict(bucket.cost(self.topology)),
        }

    def __str__(self) -> str:
        lines = [f"Plan for {self.topology}, as rank {self.topology.rank} sends it, per step:"]
        header = ("bucket", "variable", "shape", "dtype", "scheme", "in the node", "across nodes", "reason")
        rows = [row for i, bucket in enumerate(self.buckets) for row in self._rows(i, bucket)]
        total = ("total", "", "", "", "", readable(self.cost.node_bytes), readable(self.cost.cross_bytes), "")
        lines += table([header, *rows, total])
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _rows(self, index: int, bucket: Bucket) -> list[tuple[str, ...]]:
        cost = bucket.cost(self.topology)
        figures = (readable(cost.node_bytes), readable(cost.cross_bytes), bucket.reason)
        rows: list[tuple[str, ...]] = []
        for place, d in enumerate(bucket.descriptions):
            head = (str(index) if place == 0 else "", d.path, "x".join(map(str, d.shape)) or "scalar", d.dtype)
            rows.append((*head, str(bucket.scheme) if place == 0 else "", *(figures if place == 0 else ("", "", ""))))
        return rows


def plan(
    descriptions: Sequence[Description],
    policy: Policy,
    topology: Topology,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    notes: Sequence[str] = (),
) -> Plan:
    """Assigns schemes and fuses small gradients into buckets, last variables first (Poseidon, section 3.1).

    Variables of at least a quarter of `bucket_bytes` go by themselves, without a copy. Smaller ones share a
    bucket, while scheme and dtype are the same and it stays within `bucket_bytes`. Buckets are in the order
    in which the last of their gradients appears.
    """
    buckets: list[Bucket] = []
    filling: dict[tuple[Scheme, str], Bucket] = {}
    for member in reversed(range(len(descriptions))):
        description = descriptions[member]
        scheme, reason, candidates = _choice(policy, description, topology)
        new = Bucket(
            members=(member,), descriptions=(description,), scheme=scheme, reason=reason, candidates=candidates
        )
        if 4 * description.bytes >= bucket_bytes or new.goes_alone:
            buckets.append(new)
            continue
        key = (scheme, description.dtype)
        open_bucket = filling.get(key)
        if open_bucket is None or open_bucket.bytes + new.bytes > bucket_bytes:
            filling[key] = new
            buckets += [open_bucket] if open_bucket else []
        else:
            filling[key] = open_bucket.joined(new)
    last_first = _fitted(sorted([*buckets, *filling.values()], key=lambda bucket: -bucket.members[-1]), topology)
    remarks = [b.scheme.note(b.length, topology) for b in last_first]
    remarks = [f"bucket {i}: {remark}" for i, remark in enumerate(remarks) if remark]
    return Plan(buckets=tuple(last_first), topology=topology, notes=(*notes, *remarks))


def _fitted(buckets: list[Bucket], topology: Topology) -> list[Bucket]:
    """Schemes for factors as they suit their variables."""
    load = [0.0] * topology.size
    fitted = []
    for bucket in buckets:
        scheme, factors = bucket.scheme, bucket.descriptions[0].factors
        if isinstance(scheme, FactorScheme) and factors is not None:
            scheme = scheme.fitted(factors, topology, load)
        fitted.append(dataclasses.replace(bucket, scheme=scheme))
    return fitted


def _choice(policy: Policy, description: Description, topology: Topology) -> Choice:
    """The policy's, except for variables that are too small for the scheme, or no matrices."""
    choice = policy.choose(description, topology)
    if isinstance(choice.scheme, FactorScheme) and len(description.shape) < 2:
        return Choice(AllReduce(), f"no matrix for {choice.scheme.name}")
    if description.length >= choice.scheme.min_length:
        return choice
    return Choice(
        choice.scheme.for_small or AllReduce(),
        f"fewer than {choice.scheme.min_length} elements for {choice.scheme.name}",
    )
