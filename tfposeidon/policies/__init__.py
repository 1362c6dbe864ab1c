"""Policies choose a scheme for each variable, and give the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.gradients import Description
from tfposeidon.policies.base import Choice, Policy, Uniform
from tfposeidon.schemes import REGISTRY, AllReduce, Scheme, names

__all__ = ["POLICIES", "Choice", "Policy", "Rules", "Uniform", "parse"]


@dataclass(frozen=True, init=False)
class Rules(Policy):
    """Chooses schemes by variable path: the first rule whose pattern is in the path decides.

    Variables that match no rule use all-reduce; a last rule `(".", "auto")` uses `Auto` for them.

    Args:
      rules: Pairs of a regular expression and a scheme (a name or an object), or a dict of them.

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
            f"rule {pattern!r} matches no variable path, such as {paths[0]!r}"
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
    """Converts the argument `scheme` to a policy.

    Args:
      scheme: A name, a scheme, a policy, or rules as a list of pairs or a dict.

    Returns:
      The policy itself or by its name, `Uniform` for a scheme, `Rules` for rules.

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
    # Refuse a compiled pattern, because models are saved with their rules, and it cannot be saved.
    if not isinstance(pattern, str):
        raise ValueError(
            "A rule's pattern must be a regular expression, as a string. Received: "
            f'{pattern!r} of type {type(pattern).__name__}. Write for example "embedding".'
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"A rule's pattern must be a regular expression. Received: {pattern!r} ({error}). "
            "Escape it with re.escape."
        ) from error
    return pattern


def __getattr__(name: str) -> Any:
    return names.resolve(names.POLICIES, __name__, name)


def __dir__() -> list[str]:
    return [*__all__, *names.POLICIES]
