"""Base class of policies, and the policy that uses one scheme for every variable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.config import Configured
from tfposeidon.gradients import Description, GradientReader
from tfposeidon.schemes.base import Scheme


@dataclass(frozen=True)
class Choice(Configured):
    """Scheme of one variable, with the reason for the choice.

    Example:
      >>> from tfposeidon import policies, schemes
      >>> choice = policies.Choice(schemes.AllToAll(wire_dtype="float16"), "asked for")
      >>> str(choice.scheme), choice.reason, choice.candidates
      ('alltoall(wire_dtype=float16)', 'asked for', ())
    """

    scheme: Scheme
    """Scheme that exchanges the variable's gradient."""
    reason: str
    """Reason in a few words, for the plan."""
    candidates: tuple[tuple[str, float], ...] = ()
    """Name of each scheme that was compared, and its number of bytes per node."""


class Policy(Configured, ABC):
    """Chooses schemes from the descriptions of gradients and the topology, never from values.

    Subclasses are frozen dataclasses, so that models can be saved with them.

    Example:
      >>> import dataclasses
      >>> from tfposeidon import policies, schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> from tfposeidon.gradients import Description
      >>> @dataclasses.dataclass(frozen=True)
      ... class HalfWhereLarge(policies.Policy):
      ...     least_bytes: int = 2**20
      ...     def choose(self, description, topology):
      ...         if description.bytes < self.least_bytes:
      ...             return policies.Choice(schemes.AllReduce(), "small")
      ...         return policies.Choice(schemes.AllToAll(wire_dtype="float16"), "large")
      >>> kernel = Description("fc/kernel", (4096, 4096), "float32")
      >>> topology = Topology.regular(rank=0, size=4, ranks_per_node=1)
      >>> str(HalfWhereLarge().choose(kernel, topology).scheme)
      'alltoall(wire_dtype=float16)'
    """

    @abstractmethod
    def choose(self, description: Description, topology: Topology) -> Choice:
        """Chooses the scheme of one variable.

        Args:
          description: Description of the variable's gradient.
          topology: Topology of the job; the choice is the same on all ranks.

        Returns:
          The scheme, with the reason for the choice.
        """

    def notes(self, descriptions: Sequence[Description]) -> list[str]:
        """Returns remarks for the plan, such as on a rule that matches no variable.

        Args:
          descriptions: Descriptions of all gradients of the plan.

        Returns:
          One line per remark; none by default.
        """
        return []

    @property
    def parts(self) -> tuple[Policy, ...]:
        """Policies that this policy combines; none by default."""
        return ()

    @property
    def reader(self) -> GradientReader | None:
        """Reader of the gradients' structures that choices depend on; `None` if on none."""
        return next((part.reader for part in self.parts if part.reader), None)

    @property
    def keeps_state(self) -> bool:
        """True if some of the policy's schemes have state, even on one rank."""
        return any(part.keeps_state for part in self.parts)

    @property
    def corrects_momentum(self) -> bool:
        """True if some of the schemes accumulate velocity, so that the optimizer must not."""
        return any(part.corrects_momentum for part in self.parts)

    @property
    def planner(self) -> Callable[..., Any] | None:
        """Class of the planner that this policy needs; `None` if `choose` determines the plan.

        The planner is a subclass of `tfposeidon.exchange.agreed_plan.Planner`, and replaces
        `choose` if choices depend on more than descriptions and topology.
        """
        return next((part.planner for part in self.parts if part.planner), None)

    @property
    def is_fixed(self) -> bool:
        """True if `choose` alone determines the plan."""
        return self.planner is None


@dataclass(frozen=True)
class Uniform(Policy):
    """Uses one scheme for every variable.

    Args:
      scheme: Scheme for every variable.

    Example:
      >>> from tfposeidon import policies, schemes
      >>> policies.parse("alltoall") == policies.Uniform(schemes.AllToAll())
      True
    """

    scheme: Scheme

    def __post_init__(self) -> None:
        # Check the class that defines `__init__`: a subclass that adds one may have other options.
        made_by = next(cls for cls in type(self.scheme).__mro__ if "__init__" in vars(cls))
        parameters = vars(made_by).get("__dataclass_params__")
        if parameters is None or not parameters.frozen:
            raise ValueError(
                "A scheme must be a frozen dataclass: ranks compare its options, and models are "
                f"saved with them. Received: scheme={self.scheme!r}. Put @dataclasses.dataclass("
                f"frozen=True, kw_only=True) before the class {type(self.scheme).__name__}."
            )

    def __str__(self) -> str:
        return str(self.scheme)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        return Choice(self.scheme, "configured")

    @property
    @override
    def reader(self) -> GradientReader | None:
        return self.scheme.reader

    @property
    @override
    def keeps_state(self) -> bool:
        return bool(self.scheme.slots(max(1, self.scheme.min_length), Topology(0, ((0,),))))

    @property
    @override
    def corrects_momentum(self) -> bool:
        return self.scheme.corrects_momentum
