"""The policy `auto`, which chooses the scheme with the shortest predicted step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from tfposeidon import ranges
from tfposeidon.autotune.planner import AutoPlanner
from tfposeidon.autotune.search import Tunable
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.description import Description, GradientReader
from tfposeidon.policies.base import Choice, Policy
from tfposeidon.policies.rules import POLICIES
from tfposeidon.schemes import AllReduce, AllToAll, HiTopK, Scheme, TopK, Torus2D

COMPRESSION, DENSITY = ("fp16", "topk"), 0.01
"""Kinds of compression, and the default density of sparse schemes."""


@dataclass(frozen=True)
class Auto(Tunable):
    """Chooses the scheme and the bucket size with the shortest predicted step.

    It needs the network profile of the job, which is measured at the first step unless it is passed
    to `tfposeidon.init(network=...)`. On GPUs it is measured only on request; without it every
    variable uses all-reduce. By default, only schemes whose means are exact up to rounding are
    considered.

    Args:
      compression: Kinds of compression to consider: `"fp16"` for schemes that send 16 bits,
        `"topk"` for sparse schemes. None by default, so all schemes are lossless.
      density: Share of elements that sparse schemes send, in (0, 1] (default 0.01).
      margin: Share by which a predicted step must be shorter than with all-reduce, in [0, 1)
        (default 0.02).
      race: True (default) to time the exchanges of the best candidates if their predicted steps
        differ by less than 10 %, or by less than the uncertainty of the network profile. Without
        timed trials, the first plan is a pure function of network profile, model and ranks. In
        `fit`, measured step times decide later.

    Raises:
      ValueError: If `density` or `margin` is out of its range, a kind is unknown, or `density` is
        given without "topk".

    Example:
      >>> import keras, tfposeidon as tp
      >>> policy = tp.policies.Auto(compression=("fp16",))
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=policy)
      >>> optimizer.policy
      Auto(compression=('fp16',), density=0.01, margin=0.02, race=True)
    """

    compression: tuple[str, ...] = ()
    density: float = DENSITY
    margin: float = 0.02
    race: bool = True

    def __post_init__(self) -> None:
        ranges.check_number("margin", self.margin, ranges.BELOW_1, "Leave it out for 2 %.")
        ranges.check_number("density", self.density, ranges.FRACTION, "Leave it out for 1 %.")
        given = self.compression
        kinds = [given] if isinstance(given, str) else given
        if not isinstance(kinds, list | tuple | set | frozenset) or set(kinds) - {*COMPRESSION}:
            raise ValueError(
                f"`compression` must be one or more of {', '.join(COMPRESSION)}. Received: "
                f"compression={given!r}. Leave it out for lossless schemes."
            )
        if self.density != DENSITY and "topk" not in kinds:
            raise ValueError(
                f"`density` applies only to sparse schemes. Received: density={self.density}, "
                f'compression={given!r}. Add "topk" to `compression`.'
            )
        # A tuple in a fixed order, so that ranks and runs can be compared.
        ordered = tuple(kind for kind in COMPRESSION if kind in kinds)
        object.__setattr__(self, "compression", ordered)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        why = "the network profile is unknown" if topology.size > 1 else "a single rank"
        return Choice(AllReduce(), f"auto: {why}")

    @override
    def candidates(self, topology: Topology) -> dict[str, Policy]:
        by_rows = _by_rows()
        found = [
            Considered(scheme, structured)
            for structured in ([None, by_rows] if by_rows else [None])
            for scheme in self._schemes(topology)
        ]
        return {str(one): one for one in found}

    @property
    @override
    def reader(self) -> GradientReader | None:
        by_rows = _by_rows()
        return None if by_rows is None else by_rows.reader

    @property
    @override
    def planner(self) -> type[AutoPlanner]:
        return AutoPlanner

    @property
    @override
    def races(self) -> bool:
        return self.race

    def _schemes(self, topology: Topology) -> list[Scheme]:
        # On one node, or with nodes of one rank, the torus equals `AllToAll`.
        has_levels = len(topology.nodes) > 1 and topology.positions > 1
        schemes: list[Scheme] = [AllReduce(), AllToAll(), *([Torus2D()] if has_levels else [])]
        if "fp16" in self.compression:
            schemes += [replace(scheme, wire_dtype="float16") for scheme in schemes]  # type: ignore
        if "topk" in self.compression:
            wire_dtype = "float16" if "fp16" in self.compression else None
            schemes += [
                kind(density=self.density, wire_dtype=wire_dtype) for kind in (HiTopK, TopK)
            ]
        return schemes


def _by_rows() -> Policy | None:
    """Returns the policy that sends sufficient factors where they are fewer bytes, if installed."""
    return POLICIES["hybcomm"]() if "hybcomm" in POLICIES else None


@dataclass(frozen=True)
class Considered(Policy):
    """One scheme for all variables, or factors for gradients that have few batch rows.

    It is a candidate of `Auto`. `structured` chooses a scheme by the batch rows of each step.
    """

    scheme: Scheme
    structured: Policy | None = None

    def __str__(self) -> str:
        return f"factors and {self.scheme}" if self.structured else str(self.scheme)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        scheme = self.scheme
        if self.structured is not None and description.structure is not None:
            by_rows: Any = self.structured.choose(description.sized(None), topology).scheme
            # Products have no state from step to step.
            dense = AllReduce() if scheme.slots(description.length, topology) else scheme
            scheme = replace(by_rows, many=dense).fitted(description.structure, topology)
        return Choice(scheme, "auto: shortest predicted step")
