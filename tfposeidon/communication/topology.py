"""The ranks of a job, their nodes, and the groups in which they exchange.

Everything here is pure: `launcher` finds the facts, `runtime` starts Horovod on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tfposeidon.ranges import check_integer


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective together.

    Attributes:
      ranks: Ranks of the group, in ascending order.

    >>> Group((1, 3)).index(3)
    1
    """

    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def index(self, rank: int) -> int:
        """Returns the index of a rank in the group; what the group's collectives call its rank.

        Args:
          rank: Rank of the group.
        """
        return self.ranks.index(rank)


@dataclass(frozen=True)
class Topology:
    """Ranks of a job and their nodes, as one of the ranks sees them.

    Args:
      rank: Rank of this process.
      nodes: Ranks of each node; together each of `0..size-1` once.

    Raises:
      ValueError: If a rank is missing or occurs twice, or if `rank` is none of them.

    >>> topology = Topology(2, ((0, 1), (2, 3)))
    >>> topology.node.ranks, topology.position, topology.position_group(0).ranks
    ((2, 3), 0, (0, 2))
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
        """Makes nodes of consecutive ranks, all of the same size but for the last.

        Args:
          rank: Rank of this process.
          size: Number of ranks.
          ranks_per_node: Ranks of each node; the last one has fewer where that does not divide.

        Returns:
          The topology as `rank` sees it.

        Raises:
          ValueError: If `ranks_per_node` is not a whole number from 1.

        >>> Topology.regular(0, 5, ranks_per_node=2).nodes
        ((0, 1), (2, 3), (4,))
        """
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
        """Number of ranks in the job."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def world(self) -> Group:
        """All ranks."""
        return Group(tuple(range(self.size)))

    @cached_property
    def node_index(self) -> int:
        """Index of this rank's node."""
        return next(i for i, node in enumerate(self.nodes) if self.rank in node)

    @cached_property
    def node(self) -> Group:
        """Ranks of this rank's node."""
        return Group(self.nodes[self.node_index])

    @property
    def position(self) -> int:
        """Index of this rank in its node."""
        return self.node.index(self.rank)

    @property
    def positions(self) -> int:
        """Number of positions that every node has: the size of the smallest node."""
        return min(len(node) for node in self.nodes)

    def position_group(self, position: int) -> Group:
        """Returns the ranks at one position of every node, one rank per node.

        Args:
          position: Position in the nodes, from 0 to `positions` - 1.
        """
        # Under MPI nodes need not hold consecutive ranks, and Horovod sorts those of a process set.
        return Group(tuple(sorted(node[position] for node in self.nodes)))

    @property
    def across(self) -> Group | None:
        """Position group of this rank; `None` if other nodes are too small to have its position."""
        return self.position_group(self.position) if self.position < self.positions else None

    def same_node(self, a: int, b: int) -> bool:
        """Returns whether two ranks are on one node.

        Args:
          a: Rank to compare.
          b: Rank to compare it with.
        """
        return any(a in node and b in node for node in self.nodes)

    def groups(self) -> tuple[Group, ...]:
        """Returns the groups of two or more ranks, without the world, that Horovod has to set up.

        Nodes come first, then positions, without those that occur twice: the order is the same on
        all ranks.
        """
        candidates: Sequence[Group] = [Group(node) for node in self.nodes]
        candidates = [*candidates, *(self.position_group(p) for p in range(self.positions))]
        return tuple(dict.fromkeys(g for g in candidates if 1 < g.size < self.size))

    def seen_from(self, rank: int) -> Topology:
        """Returns the topology of the same job as another rank sees it.

        Args:
          rank: Rank that sees it.
        """
        return Topology(rank, self.nodes)

    def __str__(self) -> str:
        sizes = [len(node) for node in self.nodes]
        layout = (
            f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        )
        return f"{self.size} rank(s) on {len(sizes)} node(s) ({layout})"
