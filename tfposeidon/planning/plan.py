"""The coordinator: descriptions + topology + policy -> plan. It is pure; nothing is sent here."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.description import Description
from tfposeidon.policies import Choice, Policy
from tfposeidon.schemes import AllReduce, ByRows, FactorScheme, Scheme, ShardedServer, VectorScheme
from tfposeidon.schemes.base import Slot
from tfposeidon.schemes.cost import Cost
from tfposeidon.text import table
from tfposeidon.units import readable_size

DEFAULT_BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are sent as one vector, in the order of their variables' reversed list.

    Attributes:
      members: Places of the variables in the list that the plan was made for.
      descriptions: Their descriptions, in the same order; all of one dtype.
      scheme: How the bucket is exchanged.
      choices: Why, for each variable, and what was weighed, in the same order.
    """

    members: tuple[int, ...]
    descriptions: tuple[Description, ...]
    scheme: Scheme
    choices: tuple[Choice, ...]

    @property
    def length(self) -> int:
        return sum(d.length for d in self.descriptions)

    @property
    def bytes(self) -> int:
        return sum(d.bytes for d in self.descriptions)

    def joined(self, other: Bucket) -> Bucket:
        """Both in one, this one's variables first."""
        return dataclasses.replace(
            self,
            members=self.members + other.members,
            descriptions=self.descriptions + other.descriptions,
            choices=self.choices + other.choices,
        )

    @property
    def dtype(self) -> str:
        return self.descriptions[0].dtype

    @property
    def takes_factors(self) -> bool:
        """Whether gradients are exchanged as products of two thin matrices, or may be."""
        return isinstance(self.scheme, FactorScheme | ByRows)

    @property
    def goes_alone(self) -> bool:
        """Whether no other variable may share it."""
        return isinstance(self.scheme, FactorScheme)

    @property
    def server(self) -> ShardedServer | None:
        """The scheme, if it is servers that update the variables, and not every rank."""
        return (
            self.scheme
            if isinstance(self.scheme, ShardedServer) and self.scheme.update == "server"
            else None
        )

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
        """What `topology.rank` spends on it; of two schemes, before the first step, that for many rows."""
        scheme = self.scheme.many if isinstance(self.scheme, ByRows) else self.scheme
        if isinstance(scheme, FactorScheme):
            factors = [d.factors for d in self.descriptions if d.factors]
            return sum((scheme.factor_cost(one, topology) for one in factors), Cost())
        assert isinstance(scheme, VectorScheme)
        return scheme.cost(self.length, self.descriptions[0].itemsize, topology)

    def with_rows(self, rows: float, policy: Policy, topology: Topology) -> Bucket:
        """As a step took it whose variables had so many rows, all of them and all ranks together."""
        rows /= len(self.members)
        known = tuple(
            dataclasses.replace(
                d, factors=d.factors and dataclasses.replace(d.factors, rows=rows / topology.size)
            )
            for d in self.descriptions
        )
        return dataclasses.replace(
            self,
            descriptions=known,
            scheme=self.scheme.taken(rows) if isinstance(self.scheme, ByRows) else self.scheme,
            choices=tuple(_choice(policy, d, topology) for d in known),
        )


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
        """The plan for machines: topology, notes, buckets with scheme and bytes, and for each variable the reason."""
        buckets = [self._bucket_to_dict(bucket) for bucket in self.buckets]
        content = {
            "nodes": self.topology.nodes,
            "rank": self.topology.rank,
            "buckets": buckets,
            "notes": self.notes,
        }
        return json.dumps(content, indent=2)

    def _bucket_to_dict(self, bucket: Bucket) -> dict[str, Any]:
        return {
            "scheme": bucket.scheme.name,
            "options": bucket.scheme.get_config(),
            "dtype": bucket.dtype,
            "variables": [
                {
                    "path": d.path,
                    "shape": d.shape,
                    "reason": choice.reason,
                    "candidates": dict(choice.candidates),
                }
                for d, choice in zip(bucket.descriptions, bucket.choices, strict=True)
            ],
            "cost": dataclasses.asdict(bucket.cost(self.topology)),
        }

    def __str__(self) -> str:
        lines = [f"Plan for {self.topology}, as rank {self.topology.rank} sends it, per step:"]
        header = (
            "bucket",
            "variable",
            "shape",
            "dtype",
            "scheme",
            "in the node",
            "across nodes",
            "reason",
        )
        rows = [row for i, bucket in enumerate(self.buckets) for row in self._rows(i, bucket)]
        total = (
            "total",
            "",
            "",
            "",
            "",
            readable_size(self.cost.node_bytes),
            readable_size(self.cost.cross_bytes),
            "",
        )
        lines += table([header, *rows, total])
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _rows(self, index: int, bucket: Bucket) -> list[tuple[str, ...]]:
        cost = bucket.cost(self.topology)
        figures = (
            str(bucket.scheme),
            readable_size(cost.node_bytes),
            readable_size(cost.cross_bytes),
        )
        rows: list[tuple[str, ...]] = []
        above = ""
        for place, (d, choice) in enumerate(zip(bucket.descriptions, bucket.choices, strict=True)):
            head = (
                str(index) if place == 0 else "",
                d.path,
                "x".join(map(str, d.shape)) or "scalar",
                d.dtype,
            )
            # Once for all variables of a bucket that have it in common.
            reason, above = "" if choice.reason == above else choice.reason, choice.reason
            rows.append((*head, *(figures if place == 0 else ("", "", "")), reason))
        return rows


def make_plan(
    descriptions: Sequence[Description],
    policy: Policy,
    topology: Topology,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    notes: Sequence[str] = (),
) -> Plan:
    """Assigns schemes and fuses small gradients into buckets, last variables first (Poseidon, section 3.1).

    Variables of at least a quarter of `bucket_bytes` go by themselves, without a copy. Smaller ones share a
    bucket, while scheme and dtype are the same (and where rows decide, the shape of factors) and it stays within
    `bucket_bytes`. Buckets are in the order in which the last of their gradients appears.
    """
    buckets: list[Bucket] = []
    filling: dict[Any, Bucket] = {}
    for member in reversed(range(len(descriptions))):
        description = descriptions[member]
        choice = _choice(policy, description, topology)
        scheme = choice.scheme
        new = Bucket(
            members=(member,), descriptions=(description,), scheme=scheme, choices=(choice,)
        )
        if 4 * description.bytes >= bucket_bytes or new.goes_alone:
            buckets.append(new)
            continue
        key = (
            scheme,
            description.dtype,
            description.factors if isinstance(scheme, ByRows) else None,
        )
        open_bucket = filling.get(key)
        if open_bucket is None or open_bucket.bytes + new.bytes > bucket_bytes:
            filling[key] = new
            buckets += [open_bucket] if open_bucket else []
        else:
            filling[key] = open_bucket.joined(new)
    last_first = _fitted(
        sorted([*buckets, *filling.values()], key=lambda bucket: -bucket.members[-1]), topology
    )
    remarks = [b.scheme.note(b.length, topology) for b in last_first]
    remarks = [f"bucket {i}: {remark}" for i, remark in enumerate(remarks) if remark]
    return Plan(buckets=tuple(last_first), topology=topology, notes=(*notes, *remarks))


def with_rows(plan: Plan, rows: Sequence[float], policy: Policy) -> Plan:
    """The plan as a step followed it that had so many rows.

    Args:
      plan: As `plan` makes it.
      rows: At a bucket's place, those of all its variables and ranks; 0 where nobody knows them.
      policy: That of the plan.
    """
    pairs = zip(plan.buckets, rows, strict=False)
    buckets = [
        b.with_rows(float(n), policy, plan.topology) if b.takes_factors and n else b
        for b, n in pairs
    ]
    return dataclasses.replace(plan, buckets=tuple(buckets))


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
    """The policy's, except for variables that are too small for the scheme, or whose gradients are no products."""
    choice = policy.choose(description, topology)
    if isinstance(choice.scheme, FactorScheme) and len(description.shape) < 2:
        return choice._replace(scheme=AllReduce(), reason=f"no matrix for {choice.scheme.name}")
    if isinstance(choice.scheme, FactorScheme) and description.why_no_factors:
        why = f"no factors for {choice.scheme.name}: {description.why_no_factors}"
        return choice._replace(scheme=AllReduce(), reason=why)
    if description.length >= choice.scheme.min_length:
        return choice
    return choice._replace(
        scheme=choice.scheme.for_small or AllReduce(),
        reason=f"fewer than {choice.scheme.min_length} elements for {choice.scheme.name}",
    )
