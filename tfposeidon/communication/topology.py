"""Which ranks there are, on which nodes, and in which groups they exchange.

Everything here is pure: `environment` finds the facts, `runtime` brings Horovod up on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tfposeidon.ranges import check_integer


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective together, in ascending order."""

    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def index(self, rank: int) -> int:
        """Place of `rank` in the group; what the group's collectives call its rank."""
        return self.ranks.index(rank)


@dataclass(frozen=True)
class Topology:
    """The ranks of a job as one of them sees it.

    Args:
      rank: This process.
      nodes: The ranks of each node; together each of `0..size-1` once.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.nodes):
            raise ValueError(
                f"`nodes` must hold each rank from 0 exactly once. Received: nodes={self.nodes}"
            )
        if not 0 <= self.rank < len(ranks):
            raise ValueError(
                f"`rank` must be one of the {len(ranks)} ranks. Received: rank={self.rank}"
            )

    @classmethod
    def regular(cls, rank: int, size: int, ranks_per_node: int) -> Topology:
        """Nodes of `ranks_per_node` consecutive ranks; the last one smaller where that does not divide."""
        check_integer(
            "ranks_per_node",
            ranks_per_node,
            1,
            "Leave it out to take the nodes that the launcher names.",
        )
        starts = range(0, size, ranks_per_node)
        return cls(rank, tuple(tuple(range(s, min(s + ranks_per_node, size))) for s in starts))

    @property
    def size(self) -> int:
        return sum(len(node) for node in self.nodes)

    @cached_property
    def world(self) -> Group:
        """All ranks."""
        return Group(tuple(range(self.size)))

    @cached_property
    def node_index(self) -> int:
        return next(i for i, node in enumerate(self.nodes) if self.rank in node)

    @cached_property
    def node(self) -> Group:
        """The ranks of this rank's node."""
        return Group(self.nodes[self.node_index])

    @property
    def position(self) -> int:
        """Place of this rank in its node."""
        return self.node.index(self.rank)

    @property
    def positions(self) -> int:
        """Positions that every node has: the size of the smallest node."""
        return min(len(node) for node in self.nodes)

    def position_group(self, position: int) -> Group:
        """The ranks at one position of every node, one rank per node."""
        return Group(tuple(sorted(node[position] for node in self.nodes)))

    @property
    def across(self) -> Group | None:
        """This rank's position group; `None` where larger nodes have ranks beyond the common positions."""
        return self.position_group(self.position) if self.position < self.positions else None

    def same_node(self, a: int, b: int) -> bool:
        return any(a in node and b in node for node in self.nodes)

    def groups(self) -> tuple[Group, ...]:
        """Every group of two or more ranks other than the world: what Horovod has to set up, in order."""
        candidates: Sequence[Group] = [Group(node) for node in self.nodes]
        candidates = [*candidates, *(self.position_group(p) for p in range(self.positions))]
        return tuple(dict.fromkeys(g for g in candidates if 1 < g.size < self.size))

    def seen_from(self, rank: int) -> Topology:
        """The same job as `rank` sees it."""
        return Topology(rank, self.nodes)

    def __str__(self) -> str:
        sizes = [len(node) for node in self.nodes]
        layout = (
            f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        )
        return f"{self.size} rank(s) on {len(sizes)} node(s) ({layout})"
