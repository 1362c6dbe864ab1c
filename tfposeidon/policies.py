"""Policies decide which scheme each variable goes by, and say why."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
from typing_extensions import override

from tfposeidon import ranges
from tfposeidon.communication.topology import Topology
from tfposeidon.config import Configured
from tfposeidon.gradients.description import Description
from tfposeidon.schemes import (
    REGISTRY,
    AllReduce,
    AllToAll,
    ByRows,
    FactorBroadcast,
    HierarchicalTopK,
    Scheme,
    ShardedServer,
    TopKAllGather,
    Torus2D,
)
from tfposeidon.schemes.sharded_server import PAIR_BYTES
from tfposeidon.units import readable_size


class Choice(NamedTuple):
    """Scheme for one variable, with the reason for it.

    Example:
      >>> from tfposeidon import policies, schemes
      >>> choice = policies.Choice(schemes.AllToAll(wire_dtype="float16"), "asked for")
      >>> str(choice.scheme), choice.reason, choice.candidates
      ('asa(wire_dtype=float16)', 'asked for', ())
    """

    scheme: Scheme
    """Scheme by which the variable's gradient is exchanged."""
    reason: str
    """Reason in a few words, for the plan."""
    candidates: tuple[tuple[str, float], ...] = ()
    """Name of each scheme that was weighed, and the bytes per node by it."""


class Policy(Configured, ABC):
    """Choice of schemes by the description of gradients and the topology, never by values.

    Subclasses are frozen dataclasses, so that models can be saved with them.

    Example:
      >>> import dataclasses
      >>> from tfposeidon import policies, schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> from tfposeidon.gradients.description import Description
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
      'asa(wire_dtype=float16)'
    """

    @abstractmethod
    def choose(self, description: Description, topology: Topology) -> Choice:
        """Chooses the scheme for one variable.

        Args:
          description: Description of the variable's gradient.
          topology: Topology of the job, as this rank sees it; the choice is the same on all ranks.

        Returns:
          The scheme with the reason for it.
        """

    @property
    def reads_factors(self) -> bool:
        """True if it may choose by the factors of gradients, which only the first step tells."""
        return False

    @property
    def updates_at_servers(self) -> bool:
        """True if servers update some variables, and keep the optimizer's state for them."""
        return False

    @property
    def keeps_state(self) -> bool:
        """True if some of its schemes keep something from step to step, even on one rank."""
        return False

    @property
    def corrects_momentum(self) -> bool:
        """True if some of its schemes accumulate velocity, so that the optimizer must not."""
        return False

    def candidates(self, topology: Topology) -> dict[str, Policy]:
        """Returns the policies among which the predicted step decides, by a name for each.

        Args:
          topology: Topology of the job; the result is the same on all ranks.

        Returns:
          Policies that leave nothing open; empty if this one leaves nothing open itself. The first
          is what stays where nothing is predicted to be faster.
        """
        return {}

    @property
    def leaves_open(self) -> bool:
        """True if some of what it decides is left to the predicted step."""
        return bool(self.candidates(Topology(0, ((0,),))))

    @property
    def margin(self) -> float:
        """Share by which a step must be faster than with the first of `candidates`."""
        return 0.0


@dataclass(frozen=True)
class Uniform(Policy):
    """One scheme for every variable.

    Args:
      scheme: Scheme for every variable.

    Example:
      >>> from tfposeidon import policies, schemes
      >>> policies.parse("asa16") == policies.Uniform(schemes.AllToAll(wire_dtype="float16"))
      True
    """

    scheme: Scheme

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        return Choice(self.scheme, "asked for")

    @property
    @override
    def reads_factors(self) -> bool:
        return self.scheme.needs_factors

    @property
    @override
    def updates_at_servers(self) -> bool:
        return self.scheme.updates_at_servers

    @property
    @override
    def keeps_state(self) -> bool:
        # Asked for a single rank, where a scheme that keeps nothing has nothing to do.
        single_rank = Topology(0, ((0,),))
        return bool(self.scheme.slots(max(1, self.scheme.min_length), single_rank))

    @property
    @override
    def corrects_momentum(self) -> bool:
        return self.scheme.corrects_momentum

    @override
    def get_config(self) -> dict[str, Any]:
        return {"scheme": keras.saving.serialize_keras_object(self.scheme)}

    @override
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Uniform:
        return cls(keras.saving.deserialize_keras_object(config["scheme"]))


@dataclass(frozen=True)
class Auto(Policy):
    """Takes the scheme and the bucket size with which a step is predicted to be shortest.

    It needs the links of the job: `tfposeidon.init(links="measure")` measures them. Without them
    every variable goes by all-reduce. By default only schemes are considered whose means are exact
    to rounding.

    Args:
      halves: True to consider schemes with 16 bits on the wire, too (default False).
      density: Share of elements that sparse schemes may send, in (0, 1]; `None` (default) considers
        no sparse schemes.
      margin: Share by which a predicted step must be shorter than with all-reduce, in [0, 1)
        (default 0.02).

    Raises:
      ValueError: If `density` or `margin` is out of its range.

    Example:
      >>> import keras, tfposeidon as tp
      >>> policy = tp.policies.Auto(halves=True)
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=policy)
      >>> optimizer.policy
      Auto(halves=True, density=None, margin=0.02)
    """

    halves: bool = False
    density: float | None = None
    margin: float = 0.02

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

    def _schemes(self, topology: Topology) -> list[Scheme]:
        # On nodes of one rank, and on one node, the torus is one all-to-all and one all-gather.
        has_levels = len(topology.nodes) > 1 and topology.positions > 1
        schemes: list[Scheme] = [AllReduce(), AllToAll(), *([Torus2D()] if has_levels else [])]
        if self.halves:
            schemes += [replace(scheme, wire_dtype="float16") for scheme in schemes]  # type: ignore
        if self.density is not None:
            wire_dtype = "float16" if self.halves else None
            schemes += [
                kind(density=self.density, wire_dtype=wire_dtype)
                for kind in (HierarchicalTopK, TopKAllGather)
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
        return f"sfb and {self.scheme}" if self.sends_factors else str(self.scheme)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        sends_factors = self.sends_factors and description.factors is not None
        scheme = FactorBroadcast() if sends_factors else self.scheme
        return Choice(scheme, "auto: shortest predicted step")


@dataclass(frozen=True, kw_only=True)
class HybComm(Policy):
    """Sends sufficient factors where they are fewer bytes, all else through the sharded store.

    With P nodes, each worker and server, and K rows a node of an M x N kernel: factors if
    2 K (P - 1) (M + N) is at most 2 M N (P + P - 2) / P (BestScheme). Ranks of one node alone count
    as nodes. Each step decides for itself, by the rows that all ranks have in it; the plan shows
    what the last one took.

    Args:
      pair_bytes: Size of the store's pairs in bytes (default 2 MiB), as in `ShardedServer`.

    Raises:
      ValueError: If `pair_bytes` is not positive.

    Source: Zhang et al. 2017 (Poseidon), Algorithm 1 and Table 1. Differs: whatever is a product of
    two matrices counts as fully connected; K are the rows that are sent, the mean over ranks,
    counted in each step; and bytes are compared, where factors may have 16 bits and the rows of an
    embedding travel with an index in place of M values.

    Example:
      >>> from tfposeidon import policies
      >>> from tfposeidon.communication.topology import Topology
      >>> from tfposeidon.gradients.description import Description
      >>> from tfposeidon.gradients.factors import FactorShape
      >>> factors = FactorShape(rows=32, left=4096, right=4096, dtype="float32")
      >>> kernel = Description("fc/kernel", (4096, 4096), "float32", factors)
      >>> topology = Topology.regular(rank=0, size=8, ranks_per_node=1)
      >>> policies.HybComm().choose(kernel, topology).reason
      'sfb 14.68 MB <= ps 234.88 MB with K=32, P=8'
    """

    pair_bytes: int = PAIR_BYTES

    def __post_init__(self) -> None:
        # Made here for its checks, so that a bad argument is refused at construction.
        _ = self._store

    @property
    def _store(self) -> ShardedServer:
        return ShardedServer(pair_bytes=self.pair_bytes)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        factors = description.factors
        if factors is None:
            reason = description.why_no_factors or "the first step tells whether it has factors"
            return Choice(self._store, reason)
        nodes, ranks_per_node = _workers(topology)
        row, _ = best_scheme_values(factors.left_columns, factors.right, 1, nodes)
        _, matrix = best_scheme_values(factors.left, factors.right, 1, nodes)
        row_bytes, matrix_bytes = row * factors.itemsize, matrix * description.itemsize
        # Algorithm 1 compares for given rows; solved for them it gives a limit that holds for every
        # step. A single rank sends nothing either way.
        most_rows = matrix_bytes / row_bytes if row_bytes else 0.0
        # Up to this limit sums in the node would be no fewer bytes than the factors themselves.
        few = FactorBroadcast(sums_in_node=False)
        limit = int(most_rows * topology.size / ranks_per_node)
        by_rows = ByRows(few=few, many=self._store, limit=limit)
        if factors.rows is None:
            return Choice(by_rows, f"sfb up to K={int(most_rows)}, ps beyond, P={nodes}")
        k = ranks_per_node * factors.rows
        # Rows are a mean over ranks: times their number they are whole again, as the step saw them.
        scheme = by_rows.for_rows(round(factors.rows * topology.size))
        sign = "<=" if scheme == by_rows.few else ">"
        compared = f"sfb {readable_size(k * row_bytes)} {sign} ps {readable_size(matrix_bytes)}"
        candidates = (("sfb", k * row_bytes), ("ps", matrix_bytes))
        return Choice(scheme, f"{compared} with K={k:g}, P={nodes}", candidates)

    @property
    @override
    def reads_factors(self) -> bool:
        return True


def _workers(topology: Topology) -> tuple[int, int]:
    """Returns Poseidon's number of nodes P, and the ranks that make one of them."""
    ranks = max(len(node) for node in topology.nodes)
    # On one node alone the ranks exchange as Poseidon's nodes do.
    return (len(topology.nodes), ranks) if len(topology.nodes) > 1 else (ranks, 1)


def best_scheme_values(m: int, n: int, k: int, p: int) -> tuple[float, float]:
    """Counts the values that a node sends and receives for an m x n kernel.

    Args:
      m: Number of rows of the kernel.
      n: Number of columns of the kernel.
      k: Number of rows of a node's factors.
      p: Number of nodes, each worker and server.

    Returns:
      The values by factors, and by the store.

    Source: Zhang et al. 2017 (Poseidon), Table 1.

    Example:
      >>> best_scheme_values(4096, 4096, k=32, p=8)
      (3670016.0, 58720256.0)
    """
    return 2.0 * k * (p - 1) * (m + n), 2.0 * m * n * (p + p - 2) / p


@dataclass(frozen=True, init=False)
class Rules(Policy):
    """Schemes chosen by hand: the first rule whose pattern is found in the variable's path decides.

    Variables that no rule matches go by all-reduce; a last rule `(".", "auto")` leaves them open.

    Args:
      rules: Pairs of a regular expression and a scheme (a name or an object), or a dict of them.

    Raises:
      ValueError: If a pattern is not a regular expression, a scheme is unknown, or some are to be
        updated at servers while others depend on factors.

    Example:
      >>> from tfposeidon.communication.topology import Topology
      >>> from tfposeidon.gradients.description import Description
      >>> policy = Rules([("embedding", "asa16"), (".*", "2dtar")])
      >>> table = Description("embedding/embeddings", (1000, 16), "float32")
      >>> choice = policy.choose(table, Topology.regular(0, size=4, ranks_per_node=2))
      >>> str(choice.scheme), choice.reason
      ('asa(wire_dtype=float16)', "rule 'embedding'")
    """

    rules: tuple[tuple[str, Policy], ...]

    def __init__(self, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        parsed = tuple((_checked_pattern(pattern), parse(scheme)) for pattern, scheme in pairs)
        # The dataclass is frozen, so that plans and configurations can be compared.
        object.__setattr__(self, "rules", parsed)
        if self.updates_at_servers and self.reads_factors:
            raise ValueError(
                "What servers update has to be known before the first step, and factors are known "
                f"only then. Received: rules with both: {self.rules}. "
                'Use update="worker", or other schemes than "hybcomm", "sfb" and "adam".'
            )

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        for pattern, policy in self.rules:
            if re.search(pattern, description.path):
                choice = policy.choose(description, topology)
                # The reasons of these two say no more than that the rule asked for it.
                asked_for = isinstance(policy, Uniform | Rules)
                return choice._replace(
                    reason=f"rule {pattern!r}" + ("" if asked_for else f": {choice.reason}")
                )
        return Choice(AllReduce(), "no rule matches")

    @override
    def candidates(self, topology: Topology) -> dict[str, Policy]:
        found = [policy.candidates(topology) for _, policy in self.rules]
        names = dict.fromkeys(itertools.chain(*found))
        return {name: self._with_candidates(name, found) for name in names}

    def _with_candidates(self, name: str, found: Sequence[dict[str, Policy]]) -> Policy:
        """Returns the rules with what is left open decided by the candidate of a name."""
        return Rules(
            [
                (pattern, open_to.get(name, next(iter(open_to.values()))) if open_to else policy)
                for (pattern, policy), open_to in zip(self.rules, found, strict=True)
            ]
        )

    @property
    @override
    def margin(self) -> float:
        return max(policy.margin for _, policy in self.rules) if self.rules else 0.0

    @property
    @override
    def reads_factors(self) -> bool:
        return any(policy.reads_factors for _, policy in self.rules)

    @property
    @override
    def updates_at_servers(self) -> bool:
        return any(policy.updates_at_servers for _, policy in self.rules)

    @property
    @override
    def keeps_state(self) -> bool:
        return any(policy.keeps_state for _, policy in self.rules)

    @property
    @override
    def corrects_momentum(self) -> bool:
        return any(policy.corrects_momentum for _, policy in self.rules)

    @override
    def get_config(self) -> dict[str, Any]:
        return {
            "rules": [[p, keras.saving.serialize_keras_object(policy)] for p, policy in self.rules]
        }

    @override
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Rules:
        return cls(
            [(p, keras.saving.deserialize_keras_object(policy)) for p, policy in config["rules"]]
        )


POLICIES: dict[str, Callable[[], Policy]] = {"auto": Auto, "hybcomm": HybComm}
"""Makes a policy with its defaults, by the name that users pass as `scheme=`."""


def parse(scheme: Any) -> Policy:
    """Turns what users pass as `scheme=` into a policy.

    Args:
      scheme: A name, a scheme, a policy, or rules as a list of pairs or a dict.

    Returns:
      The policy that is given or named, `Uniform` for a scheme, `Rules` for rules.

    Raises:
      ValueError: If it is none of these; the message lists the names.

    Example:
      >>> parse("hybcomm")
      HybComm(pair_bytes=2097152)
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
        f"`scheme` must be one of {names}, an object of tfposeidon.schemes or tfposeidon.policies, "
        f"or rules [(pattern, scheme), ...]. Received: scheme={scheme!r}"
    )


def _parse_rules(rules: Any) -> Rules:
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"Rules must be pairs of a pattern and a scheme. Received: scheme={rules!r}. "
            'Write for example [("embedding", "asa16"), (".*", "2dtar")].'
        )
    return Rules(pairs)


def _checked_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"A rule's pattern must be a regular expression. Received: {pattern!r} ({error})"
        ) from error
    return pattern
