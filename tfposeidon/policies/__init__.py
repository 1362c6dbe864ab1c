"""Policies choose a scheme for each variable, and state the reason."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.config import Configured
from tfposeidon.gradients import Description, GradientReader
from tfposeidon.schemes import REGISTRY, AllReduce, Scheme, names

__all__ = ["POLICIES", "Choice", "Policy", "Rules", "Uniform", "parse"]


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
        """Reader of the structures on which choices depend; `None` if choices need no structure."""
        return next((part.reader for part in self.parts if part.reader), None)

    @property
    def keeps_state(self) -> bool:
        """True if some of the policy's schemes have state, even on one rank."""
        return any(part.keeps_state for part in self.parts)

    @property
    def corrects_momentum(self) -> bool:
        """True if a scheme accumulates velocity. The optimizer's momentum must then be 0."""
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


@dataclass(frozen=True, init=False)
class Rules(Policy):
    """Chooses schemes by variable path: the first rule whose pattern is in the path decides.

    Variables that match no rule use all-reduce; a last rule `(".", "auto")` uses `Auto` for them.

    Args:
      rules: Pairs of a regular expression and a scheme (name or object), or a dict from
        expressions to schemes.

    Raises:
      ValueError: If `rules` are not pairs, a pattern is not a regular expression, a scheme is
        unknown, or policies have different planners or readers, because a plan has only one of
        each.

    Example:
      >>> from tfposeidon.communication.topology import Topology
      >>> from tfposeidon.gradients import Description
      >>> from tfposeidon.schemes import AllToAll
      >>> policy = Rules([("embedding", AllToAll(wire_dtype="float16")), (".*", "torus2d")])
      >>> table = Description("embedding/embeddings", (1000, 16), "float32")
      >>> choice = policy.choose(table, Topology.regular(0, size=4, ranks_per_node=2))
      >>> str(choice.scheme), choice.reason
      ('alltoall(wire_dtype=float16)', "rule 'embedding'")
    """

    rules: tuple[tuple[str, Policy], ...]

    def __init__(self, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                f"Rules must be pairs of a pattern and a scheme. Received: {rules!r}. "
                'Write for example [("embedding", "alltoall"), (".*", "torus2d")].'
            )
        parsed = tuple((_checked_pattern(pattern), parse(scheme)) for pattern, scheme in pairs)
        # Use `object.__setattr__`, because the dataclass is frozen.
        object.__setattr__(self, "rules", parsed)
        _check_same("planner", [part.planner for part in self.parts if not part.is_fixed])
        _check_same("reader", [type(part.reader) for part in self.parts if part.reader])

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        for pattern, policy in self.rules:
            if re.search(pattern, description.path):
                choice = policy.choose(description, topology)
                # Leave out the reasons of these two policies, which add nothing to the rule.
                why = "" if isinstance(policy, Uniform | Rules) else f": {choice.reason}"
                return replace(choice, reason=f"rule {pattern!r}{why}")
        return Choice(AllReduce(), "no rule matches")

    @override
    def notes(self, descriptions: Sequence[Description]) -> list[str]:
        # A rule may stop matching in a rebuilt or loaded model, because Keras numbers layers across
        # all models of a process.
        paths = [description.path for description in descriptions]
        return [
            f"rule {pattern!r} matches no variable; the first path is {paths[0]!r}"
            for pattern, _ in self.rules
            if paths and not any(re.search(pattern, path) for path in paths)
        ]

    @property
    @override
    def parts(self) -> tuple[Policy, ...]:
        return tuple(policy for _, policy in self.rules)


def _check_same(kind: str, found: list[Any]) -> None:
    if len(set(found)) > 1:
        raise ValueError(
            f"Rules must not contain policies with different {kind}s, because one {kind} makes the "
            f"whole plan. Received: {', '.join(one.__name__ for one in found)}. Use policies with "
            f"the same {kind}."
        )


@dataclass(frozen=True)
class Fallback(Policy):
    """Uses all-reduce for every variable, with the reason why no other scheme is used."""

    reason: str

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        return Choice(AllReduce(), self.reason)


POLICIES: dict[str, Callable[[], Policy]] = {
    "auto": lambda: Fallback("auto: tfposeidon.autotune is not installed"),
    **names.constructors(names.POLICIES, "tfposeidon.policies"),
}
"""Constructors of policies with default options, by the name that users pass as `scheme=`."""


def parse(scheme: Any) -> Policy:
    """Returns the policy that the argument `scheme` specifies.

    Returns a policy unchanged, and creates the policy of a given name with default options.
    Converts a scheme, or its name, to `Uniform`, and a list or dict of rules to `Rules`.

    Args:
      scheme: A policy, a scheme, the name of either, or rules as a list of pairs or a dict.

    Raises:
      ValueError: If `scheme` is none of these; the message lists the names.

    Example:
      >>> parse("topk").scheme.density
      0.01
    """
    if isinstance(scheme, Policy):
        return scheme
    if isinstance(scheme, Scheme):
        return Uniform(scheme)
    if isinstance(scheme, str) and scheme in POLICIES:
        return POLICIES[scheme]()
    if isinstance(scheme, str) and scheme in REGISTRY:
        return Uniform(REGISTRY[scheme]())
    if isinstance(scheme, Mapping | list | tuple):
        return Rules(scheme)
    known = ", ".join(f'"{name}"' for name in (*POLICIES, *REGISTRY))
    raise ValueError(
        f"`scheme` must be one of {known}, an object of a class of tfposeidon.schemes or "
        "tfposeidon.policies or of a custom subclass of Scheme or Policy, or rules [(pattern, "
        f'scheme), ...]. Received: scheme={scheme!r}. Use for example "allreduce".'
    )


def _checked_pattern(pattern: Any) -> str:
    # Refuse a compiled pattern: rules are saved with models, and Keras cannot save such an object.
    problem = f"of type {type(pattern).__name__}"
    if isinstance(pattern, str):
        try:
            return re.compile(pattern).pattern
        except re.error as error:
            problem = str(error)
    raise ValueError(
        f"A rule's pattern must be a regular expression, as a string. Received: {pattern!r} "
        f'({problem}). Write for example "embedding", or escape it with re.escape.'
    )


def __getattr__(name: str) -> Any:
    return names.resolve(names.POLICIES, __name__, name)


def __dir__() -> list[str]:
    return [*__all__, *names.POLICIES]
