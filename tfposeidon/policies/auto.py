"""`auto`: the schemes with which a step is predicted to be shortest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from tfposeidon import ranges
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.description import Description
from tfposeidon.policies.base import Choice, Policy
from tfposeidon.schemes import (
    AllReduce,
    AllToAll,
    Factors,
    HiTopK,
    Scheme,
    TopK,
    Torus2D,
)


@dataclass(frozen=True)
class Auto(Policy):
    """Takes the scheme and the bucket size with which a step is predicted to be shortest.

    It needs the links of the job, which are measured at the first step unless they are given to
    `tfposeidon.init(links=...)`. On GPUs they are measured only if that is asked for; without them
    every variable goes by all-reduce. By default only schemes are considered whose means are exact
    to rounding.

    Args:
      halves: True to consider schemes with 16 bits on the wire, too (default False).
      density: Share of elements that sparse schemes may send, in (0, 1]; `None` (default) considers
        no sparse schemes.
      margin: Share by which a predicted step must be shorter than with all-reduce, in [0, 1)
        (default 0.02).
      race: True (default) to time the exchanges of the best candidates, where their predicted steps
        differ by less than 10 %, or than what links are uncertain by. Without it the plan is a pure
        function of links, model and ranks.

    Raises:
      ValueError: If `density` or `margin` is out of its range.

    Example:
      >>> import keras, tfposeidon as tp
      >>> policy = tp.policies.Auto(halves=True)
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=policy)
      >>> optimizer.policy
      Auto(halves=True, density=None, margin=0.02, race=True)
    """

    halves: bool = False
    density: float | None = None
    margin: float = 0.02
    race: bool = True

    def __post_init__(self) -> None:
        ranges.check_number("margin", self.margin, ranges.BELOW_1, "Leave it out for 2 %.")
        if self.density is not None:
            remedy = "Leave it out to consider no sparse schemes."
            ranges.check_number("density", self.density, ranges.FRACTION, remedy)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        reason = "auto: the links are not known" if topology.size > 1 else "auto: a single rank"
        return Choice(AllReduce(), reason)

    @override
    def candidates(self, topology: Topology) -> dict[str, Policy]:
        found = [Considered(scheme) for scheme in self._schemes(topology)]
        with_factors = [Considered(one.scheme, sends_factors=True) for one in found]
        return {str(one): one for one in (*found, *with_factors)}

    @property
    @override
    def races(self) -> bool:
        return self.race

    def _schemes(self, topology: Topology) -> list[Scheme]:
        # On nodes of one rank, and on one node, the torus is one all-to-all and one all-gather.
        has_levels = len(topology.nodes) > 1 and topology.positions > 1
        schemes: list[Scheme] = [AllReduce(), AllToAll(), *([Torus2D()] if has_levels else [])]
        if self.halves:
            schemes += [replace(scheme, wire_dtype="float16") for scheme in schemes]  # type: ignore
        if self.density is not None:
            wire_dtype = "float16" if self.halves else None
            schemes += [
                kind(density=self.density, wire_dtype=wire_dtype) for kind in (HiTopK, TopK)
            ]
        return schemes


@dataclass(frozen=True)
class Considered(Policy):
    """One scheme for all variables, which `Auto` compares with others by the predicted step.

    Args:
      scheme: Scheme of all variables, or of those without factors.
      sends_factors: True to send factors where there are any.
    """

    scheme: Scheme
    sends_factors: bool = False

    def __str__(self) -> str:
        return f"factors and {self.scheme}" if self.sends_factors else str(self.scheme)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        sends_factors = self.sends_factors and description.factors is not None
        scheme = Factors() if sends_factors else self.scheme
        return Choice(scheme, "auto: shortest predicted step")
