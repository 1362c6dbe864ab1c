"""Policies decide which scheme each variable goes by, and say why."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from tfposeidon.config import Configured
from tfposeidon.gradient import Description
from tfposeidon.schemes import REGISTRY, AllReduce, Scheme
from tfposeidon.topology import Topology


class Choice(NamedTuple):
    """A scheme, and the reason for it in a few words."""

    scheme: Scheme
    reason: str


class Policy(Configured, ABC):
    """Chooses by the description of the gradient and the topology, never by values."""

    @abstractmethod
    def choose(self, description: Description, topology: Topology) -> Choice:
        """The scheme for one variable."""


@dataclass(frozen=True)
class Uniform(Policy):
    """One scheme for everything."""

    scheme: Scheme

    def choose(self, description: Description, topology: Topology) -> Choice:
        return Choice(self.scheme, "asked for")

    def get_config(self) -> dict[str, Any]:
        return {"scheme": keras.saving.serialize_keras_object(self.scheme)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Uniform:
        return cls(keras.saving.deserialize_keras_object(config["scheme"]))


@dataclass(frozen=True)
class Auto(Policy):
    """All-reduce for every variable, until there is a cost model over measured links to choose by."""

    def choose(self, description: Description, topology: Topology) -> Choice:
        return Choice(AllReduce(), "auto means all-reduce in this version")


@dataclass(frozen=True, init=False)
class Rules(Policy):
    """By hand: the first rule whose pattern is found in the variable's path decides, else `Auto`.

    Args:
      rules: Pairs of a regular expression and a scheme (a name or an object), or a dict of them.

    Raises:
      ValueError: If a pattern is not a regular expression, or a scheme is unknown.

    >>> policy = Rules([("embedding", "asa16"), (".*", "2dtar")])
    """

    rules: tuple[tuple[str, Policy], ...]

    def __init__(self, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        object.__setattr__(self, "rules", tuple((_checked(pattern), parse(scheme)) for pattern, scheme in pairs))

    def choose(self, description: Description, topology: Topology) -> Choice:
        for pattern, policy in self.rules:
            if re.search(pattern, description.path):
                scheme = policy.choose(description, topology).scheme
                return Choice(scheme, f"rule {pattern!r}")
        return Choice(Auto().choose(description, topology).scheme, "no rule matches")

    def get_config(self) -> dict[str, Any]:
        return {"rules": [[p, keras.saving.serialize_keras_object(policy)] for p, policy in self.rules]}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Rules:
        return cls([(p, keras.saving.deserialize_keras_object(policy)) for p, policy in config["rules"]])


def parse(scheme: Any) -> Policy:
    """Turns what users pass as `scheme=` into a policy.

    Args:
      scheme: A name, a scheme, a policy, or rules as a list of pairs or a dict.

    Raises:
      ValueError: If it is none of these; the message lists the names.
    """
    if isinstance(scheme, Policy):
        return scheme
    if isinstance(scheme, Scheme):
        return Uniform(scheme)
    if scheme == "auto":
        return Auto()
    if isinstance(scheme, str) and scheme in REGISTRY:
        return Uniform(REGISTRY[scheme]())
    if isinstance(scheme, Mapping | list | tuple):
        return _parse_rules(scheme)
    names = ", ".join(f'"{name}"' for name in ("auto", *REGISTRY))
    raise ValueError(
        f"`scheme` must be one of {names}, an object of tfposeidon.schemes or tfposeidon.policies, or rules "
        f"[(pattern, scheme), ...]. Received: scheme={scheme!r}"
    )


def _parse_rules(rules: Any) -> Rules:
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"Rules must be pairs of a pattern and a scheme. Received: scheme={rules!r}")
    return Rules(pairs)


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"A rule's pattern must be a regular expression. Received: {pattern!r} ({error})") from error
    return pattern
