"""Policies whose choices are left to predicted steps, alone or within rules."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.policies import Policy, Rules


class Tunable(Policy):
    """Base class of policies that leave the choice among candidates to a planner."""

    @abstractmethod
    def candidates(self, topology: Topology) -> dict[str, Policy]:
        """Returns the policies among which the predicted step decides, by name.

        Args:
          topology: Topology of the job; the result is the same on all ranks.

        Returns:
          Policies without candidates of their own. The first one is used if none is predicted to be
          faster.
        """

    @property
    @abstractmethod
    @override
    def planner(self) -> Callable[..., Any]:
        """Class of the planner that decides, a subclass of `AutoPlanner`."""

    @property
    def races(self) -> bool:
        """True if the best of `candidates` are timed where predictions are close."""
        return False

    @property
    def margin(self) -> float:
        """Share by which a step must be faster than with the first of `candidates`."""
        return 0.0


def candidates_of(policy: Policy, topology: Topology) -> dict[str, Policy]:
    """Returns the candidates of a policy or of rules that contain one; none if it is fixed."""
    if isinstance(policy, Tunable):
        return policy.candidates(topology)
    if not isinstance(policy, Rules):
        return {}
    found = [candidates_of(part, topology) for _, part in policy.rules]
    together = dict.fromkeys(itertools.chain(*found))
    return {name: _with_candidates(policy, name, found) for name in together}


def _with_candidates(rules: Rules, name: str, found: Sequence[dict[str, Policy]]) -> Policy:
    """Returns the rules with undecided policies replaced by their candidate of this name."""
    return Rules(
        [
            (pattern, open_to.get(name, next(iter(open_to.values()))) if open_to else policy)
            for (pattern, policy), open_to in zip(rules.rules, found, strict=True)
        ]
    )


def margin_of(policy: Policy) -> float:
    """Returns the largest `margin` in a policy or rules."""
    return max((part.margin for part in _tunable_parts(policy)), default=0.0)


def races(policy: Policy) -> bool:
    """Returns whether any part of a policy or of rules is decided by timed trials."""
    return any(part.races for part in _tunable_parts(policy))


def _tunable_parts(policy: Policy) -> Iterator[Tunable]:
    if isinstance(policy, Tunable):
        yield policy
    elif isinstance(policy, Rules):
        for _, part in policy.rules:
            yield from _tunable_parts(part)
