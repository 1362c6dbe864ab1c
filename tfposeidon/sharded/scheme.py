"""Scheme of sharded updates: reduce-scatter of gradients, and all-gather of updated variables.

`OwnParts` leaves each mean with its shard owner; the optimizer gathers the updated values later.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.gradients.description import Description
from tfposeidon.policies import Choice, Policy
from tfposeidon.schemes import ParameterServer, stages
from tfposeidon.schemes.base import State


@dataclass(frozen=True, kw_only=True)
class OwnParts(ParameterServer):
    """Parameter server that leaves means with their shard owners."""

    name: ClassVar[str] = "ps"

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        return stages.own_mean_by_levels(gradient, wire, name, None), state

    @override
    def unpack(
        self, mean: tf.Tensor, descriptions: Sequence[Description], topology: Topology
    ) -> list[tf.Tensor]:
        return tf.split(mean, [end - begin for begin, end in self.parts(descriptions, topology)])

    def gather(self, own: tf.Tensor, length: int, wire: Wire, name: str) -> tf.Tensor:
        """Returns a whole bucket, `[length]`, from the parts `own` of all ranks."""
        return stages.gather_by_levels(own, length, wire, name, None)

    def parts(
        self, descriptions: Sequence[Description], topology: Topology
    ) -> list[tuple[int, int]]:
        """Returns the range of each variable that `topology.rank` owns; (0, 0) for none."""
        # A bucket is split as one vector, regardless of variables: a part may hold the end of one
        # variable and the start of the next. `starts` has one entry more than there are variables,
        # the end of the last one.
        starts = itertools.accumulate((d.length for d in descriptions), initial=0)
        begin, end = self.own_range(sum(d.length for d in descriptions), topology)
        parts = [
            (max(begin - start, 0), min(end - start, d.length))
            for start, d in zip(starts, descriptions, strict=False)
        ]
        return [(first, last) if first < last else (0, 0) for first, last in parts]


@dataclass(frozen=True)
class Sharded(Policy):
    """Policy that replaces the scheme `ParameterServer` with `OwnParts`."""

    policy: Policy

    def __str__(self) -> str:
        return str(self.policy)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        choice = self.policy.choose(description, topology)
        # Excludes subclasses, which have their own exchange.
        if type(choice.scheme) is not ParameterServer:
            return choice
        return replace(choice, scheme=OwnParts(pair_bytes=choice.scheme.pair_bytes))

    @override
    def notes(self, descriptions: Sequence[Description]) -> list[str]:
        return self.policy.notes(descriptions)

    @property
    @override
    def keeps_state(self) -> bool:
        return self.policy.keeps_state

    @property
    @override
    def corrects_momentum(self) -> bool:
        return self.policy.corrects_momentum
