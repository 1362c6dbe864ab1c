"""Policies decide which scheme each variable goes by, and say why."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from tfposeidon.communication.topology import Topology
from tfposeidon.config import Configured
from tfposeidon.gradients.description import Description
from tfposeidon.schemes import (
    REGISTRY,
    AllReduce,
    ByRows,
    FactorBroadcast,
    FactorScheme,
    Scheme,
    ShardedServer,
)
from tfposeidon.schemes.sharded_server import PAIR_BYTES
from tfposeidon.units import readable_size


class Choice(NamedTuple):
    """A scheme, the reason for it in a few words, and bytes a node by each scheme that was weighed."""

    scheme: Scheme
    reason: str
    candidates: tuple[tuple[str, float], ...] = ()


class Policy(Configured, ABC):
    """Chooses by the description of the gradient and the topology, never by values."""

    @abstractmethod
    def choose(self, description: Description, topology: Topology) -> Choice:
        """The scheme for one variable."""

    @property
    def reads_factors(self) -> bool:
        """Whether it chooses, or may choose, by the factors of gradients, which only the first step tells."""
        return False

    @property
    def updates_at_servers(self) -> bool:
        """Whether it lets servers update variables, for which the optimizer's state has to be built."""
        return False

    @property
    def keeps_state(self) -> bool:
        """Whether some of its schemes keep something from step to step, even on one rank."""
        return False


@dataclass(frozen=True)
class Uniform(Policy):
    """One scheme for everything."""

    scheme: Scheme

    def choose(self, description: Description, topology: Topology) -> Choice:
        return Choice(self.scheme, "asked for")

    @property
    def reads_factors(self) -> bool:
        return isinstance(self.scheme, FactorScheme)

    @property
    def updates_at_servers(self) -> bool:
        return isinstance(self.scheme, ShardedServer) and self.scheme.update == "server"

    @property
    def keeps_state(self) -> bool:
        return bool(self.scheme.slots(max(1, self.scheme.min_length), Topology(0, ((0,),))))

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


@dataclass(frozen=True, kw_only=True)
class HybComm(Policy):
    """Sufficient factors where they are fewer values than the matrix, the sharded store for everything else.

    With P nodes, each worker and server, and K rows a node of an M x N kernel: factors if 2 K (P - 1) (M + N) is at
    most 2 M N (P + P - 2) / P (BestScheme). Ranks of one node alone count as nodes. Each step decides for itself, by
    the rows that all ranks have in it; the plan shows what the last one took.

    Args:
      pair_bytes: Of the store's pairs, as in `ShardedServer`.

    Raises:
      ValueError: If `pair_bytes` is not positive.

    Source: Zhang et al. 2017 (Poseidon), Algorithm 1 and Table 1. Differs: whatever is a product of two matrices
    counts as fully connected; K are the rows that are sent, the mean over ranks, counted in each step; and bytes are
    compared, where factors may have 16 bits and the rows of an embedding travel with an index in place of M values.
    """

    pair_bytes: int = PAIR_BYTES

    def __post_init__(self) -> None:
        _ = self._store

    @property
    def _store(self) -> ShardedServer:
        return ShardedServer(pair_bytes=self.pair_bytes)

    def choose(self, description: Description, topology: Topology) -> Choice:
        factors = description.factors
        if factors is None:
            return Choice(
                self._store,
                description.why_no_factors or "the first step tells whether it has factors",
            )
        ranks = max(len(node) for node in topology.nodes)
        p, together = (len(topology.nodes), ranks) if len(topology.nodes) > 1 else (ranks, 1)
        one_row, _ = best_scheme_values(factors.left_columns, factors.right, 1, p)
        _, ps = best_scheme_values(factors.left, factors.right, 1, p)
        one_row, ps = one_row * factors.itemsize, ps * description.itemsize
        # One rank sends nothing either way.
        most = ps / one_row if one_row else 0.0
        # Up to as many rows as they are fewer than the store, sums in the node would be no fewer bytes than they.
        sfb = FactorBroadcast(sums_in_node=False)
        by_rows = ByRows(few=sfb, many=self._store, limit=int(most * topology.size / together))
        if factors.rows is None:
            return Choice(by_rows, f"sfb up to K={int(most)}, ps beyond, P={p}")
        k = together * factors.rows
        scheme = by_rows.taken(round(factors.rows * topology.size))
        sign = "<=" if scheme == by_rows.few else ">"
        reason = (
            f"sfb {readable_size(k * one_row)} {sign} ps {readable_size(ps)} with K={k:g}, P={p}"
        )
        return Choice(scheme, reason, (("sfb", k * one_row), ("ps", ps)))

    @property
    def reads_factors(self) -> bool:
        return True


def best_scheme_values(m: int, n: int, k: int, p: int) -> tuple[float, float]:
    """Values that a node sends and receives for an m x n kernel: by factors, and by the store.

    Args:
      k: Rows of a node.
      p: Nodes, each worker and server.

    Source: Zhang et al. 2017 (Poseidon), Table 1.
    """
    return 2.0 * k * (p - 1) * (m + n), 2.0 * m * n * (p + p - 2) / p


@dataclass(frozen=True, init=False)
class Rules(Policy):
    """By hand: the first rule whose pattern is found in the variable's path decides, else `Auto`.

    Args:
      rules: Pairs of a regular expression and a scheme (a name or an object), or a dict of them.

    Raises:
      ValueError: If a pattern is not a regular expression, a scheme is unknown, or some are to be updated at servers
        while others depend on factors.

    >>> policy = Rules([("embedding", "asa16"), (".*", "2dtar")])
    """

    rules: tuple[tuple[str, Policy], ...]

    def __init__(self, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        object.__setattr__(
            self, "rules", tuple((_checked(pattern), parse(scheme)) for pattern, scheme in pairs)
        )
        if self.updates_at_servers and self.reads_factors:
            raise ValueError(
                "What servers update has to be known before the first step, and factors are known only then. "
                f'Received: rules with both: {self.rules}. Use update="worker", or other schemes than "hybcomm", '
                '"sfb" and "adam".'
            )

    def choose(self, description: Description, topology: Topology) -> Choice:
        for pattern, policy in self.rules:
            if re.search(pattern, description.path):
                choice = policy.choose(description, topology)
                asked_for = isinstance(policy, Uniform | Rules)
                return choice._replace(
                    reason=f"rule {pattern!r}" + ("" if asked_for else f": {choice.reason}")
                )
        return Choice(Auto().choose(description, topology).scheme, "no rule matches")

    @property
    def reads_factors(self) -> bool:
        return any(policy.reads_factors for _, policy in self.rules)

    @property
    def updates_at_servers(self) -> bool:
        return any(policy.updates_at_servers for _, policy in self.rules)

    @property
    def keeps_state(self) -> bool:
        return any(policy.keeps_state for _, policy in self.rules)

    def get_config(self) -> dict[str, Any]:
        return {
            "rules": [[p, keras.saving.serialize_keras_object(policy)] for p, policy in self.rules]
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Rules:
        return cls(
            [(p, keras.saving.deserialize_keras_object(policy)) for p, policy in config["rules"]]
        )


POLICIES: dict[str, Callable[[], Policy]] = {"auto": Auto, "hybcomm": HybComm}
"""What `scheme=` finds besides the schemes."""


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
    if isinstance(scheme, str) and scheme in POLICIES:
        return POLICIES[scheme]()
    if isinstance(scheme, str) and scheme in REGISTRY:
        return Uniform(REGISTRY[scheme]())
    if isinstance(scheme, Mapping | list | tuple):
        return _parse_rules(scheme)
    names = ", ".join(f'"{name}"' for name in (*POLICIES, *REGISTRY))
    raise ValueError(
        f"`scheme` must be one of {names}, an object of tfposeidon.schemes or tfposeidon.policies, or rules "
        f"[(pattern, scheme), ...]. Received: scheme={scheme!r}"
    )


def _parse_rules(rules: Any) -> Rules:
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"Rules must be pairs of a pattern and a scheme. Received: scheme={rules!r}"
        )
    return Rules(pairs)


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"A rule's pattern must be a regular expression. Received: {pattern!r} ({error})"
        ) from error
    return pattern
