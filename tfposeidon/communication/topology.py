"""Describes ranks, nodes and groups of a job, and divides work among ranks.

This module has no side effects: `launcher` reads the environment, and `start` starts Horovod.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tfposeidon.checks import check_integer


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective.

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
        """Returns the index of a rank in the group, which is its rank in the group's collectives.

        Args:
          rank: Rank of the group.
        """
        return self.ranks.index(rank)


@dataclass(frozen=True)
class Topology:
    """Ranks of a job and their nodes, from the perspective of one rank.

    Args:
      rank: Rank of this process.
      nodes: Ranks of each node; each rank from 0 to `size - 1` is on exactly one node.

    Raises:
      ValueError: If a rank is missing or occurs twice, or if `rank` is not in `nodes`.

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
                "`nodes` must hold each rank from 0 exactly once, and no empty node. Received: "
                f"nodes={self.nodes}. Use Topology.regular for consecutive ranks."
            )
        if not 0 <= self.rank < len(ranks):
            raise ValueError(
                f"`rank` must be in `nodes`, from 0 to {len(ranks) - 1}. Received: rank={self.rank}"
            )

    @classmethod
    def regular(cls, rank: int, size: int, ranks_per_node: int) -> Topology:
        """Returns nodes of consecutive ranks, all of the same size except possibly the last.

        Args:
          rank: Rank of this process.
          size: Number of ranks.
          ranks_per_node: Number of ranks of each node; the last node may have fewer.

        Returns:
          The topology from the perspective of `rank`.

        Raises:
          ValueError: If `ranks_per_node` is not a positive integer.

        >>> Topology.regular(0, 5, ranks_per_node=2).nodes
        ((0, 1), (2, 3), (4,))
        """
        check_integer(
            "ranks_per_node",
            ranks_per_node,
            1,
            "Leave it out to use the nodes that the launcher reports.",
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
        """Returns the ranks at one position of every node, one rank per node."""
        # Sort the ranks, as Horovod sorts the ranks of a process set: under MPI, ranks of a node
        # may not be consecutive.
        return Group(tuple(sorted(node[position] for node in self.nodes)))

    @property
    def across(self) -> Group | None:
        """Position group of this rank, or `None` if a smaller node does not have the position."""
        return self.position_group(self.position) if self.position < self.positions else None

    def same_node(self, a: int, b: int) -> bool:
        """Returns whether two ranks are on one node."""
        return any(a in node and b in node for node in self.nodes)

    def groups(self, server_rank: int | None = None) -> tuple[Group, ...]:
        """Returns the groups of two or more ranks, except the world, that need a process set."""
        # The order must be the same on all ranks: nodes, positions, then pairs with the server.
        # Remove duplicates, because a node of two ranks may be such a pair.
        found = [*map(Group, self.nodes), *map(self.position_group, range(self.positions))]
        if server_rank is not None:
            others = (rank for rank in self.world.ranks if rank != server_rank)
            found += [Group(tuple(sorted((server_rank, rank)))) for rank in others]
        return tuple(dict.fromkeys(group for group in found if 1 < group.size < self.size))

    def seen_from(self, rank: int) -> Topology:
        """Returns the topology of the same job from the perspective of another rank."""
        return Topology(rank, self.nodes)

    def __str__(self) -> str:
        sizes = [len(node) for node in self.nodes]
        layout = (
            f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        )
        return f"{self.size} rank(s) on {len(sizes)} node(s) ({layout})"


def even_parts(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns start and end of each part; lengths differ by at most one, longer parts first.

    >>> even_parts(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    quotient, remainder = divmod(length, parts)
    begins = [quotient * part + min(part, remainder) for part in range(parts + 1)]
    return list(itertools.pairwise(begins))


def balanced_parts(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Returns start and end of each part so that the largest sum of a part is minimal.

    >>> balanced_parts([5, 1, 1, 1, 4], 3)
    [(0, 1), (1, 4), (4, 5)]
    """
    smallest = max(sizes, default=0)
    # Search for the smallest limit with which greedy filling needs no more than `parts` parts.
    limit = smallest + bisect.bisect_left(
        range(smallest, sum(sizes)), True, key=lambda limit: len(_filled(sizes, limit)) <= parts
    )
    ends = _filled(sizes, limit)
    ends += [len(sizes)] * (parts - len(ends))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Returns the ends of parts that are filled greedily up to a limit on their sum."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        if total + size > limit and total:
            ends.append(index)
            total = 0
        total += size
    return [*ends, len(sizes)]
