"""Provides a communicator whose ranks are threads of this process, and counts all sent bytes.

It transfers values like Gloo: chunks along rings, and all-to-all directly. It makes tests of many
ranks fast; the contract table also runs on real ranks.
"""

import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from tfposeidon.communication.topology import Topology


class Cluster:
    """State that the ranks of a job share: values in collectives, and sent bytes."""

    def __init__(self, nodes):
        self.topology = Topology(0, nodes)
        self.sent = Counter()
        self.calls = defaultdict(list)
        self._meetings = defaultdict(Meeting)
        self._lock = threading.Lock()

    def run(self, function):
        """Runs `function(wire)` on every rank at once; returns the results in rank order."""
        size = self.topology.size
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: function(InProcessWire(self, rank)), range(size)))

    def meet(self, rank, operation, group, name, value, itemsize):
        """Waits for all ranks of a group, and returns their values in its order."""
        with self._lock:
            self.calls[rank].append((operation, group.ranks, name, itemsize))
            meeting = self._meetings[group.ranks, name]
            assert rank not in meeting.values, f"{name} was used twice on rank {rank}"
            meeting.values[rank] = value
            if len(meeting.values) == group.size:
                meeting.complete.set()
        assert meeting.complete.wait(timeout=300), f"{name}: ranks are missing"
        return [meeting.values[r] for r in group.ranks]

    def names(self, rank):
        """Returns the names of the collectives that a rank took part in."""
        return [name for _, _, name, _ in self.calls[rank]]

    def count(self, sender, receiver, *arrays):
        bytes_sent = sum(array.nbytes for array in arrays)
        with self._lock:
            self.sent[sender, self.topology.same_node(sender, receiver)] += bytes_sent

    def bytes_of(self, rank):
        """Returns the bytes that `rank` has sent within its node and to other nodes."""
        return self.sent[rank, True], self.sent[rank, False]


class Meeting:
    """Values of a group's ranks for one collective; `complete` wakes only these ranks."""

    def __init__(self):
        self.values = {}
        self.complete = threading.Event()


class InProcessWire:
    """Communicator of one rank of a cluster; see `tfposeidon.communication.wire.Wire`."""

    def __init__(self, cluster, rank):
        self.cluster = cluster
        self.topology = cluster.topology.seen_from(rank)

    def all_reduce(self, tensor, group, name, scale=1.0):
        values = self._meet("all_reduce", tensor, group, name)
        p, me = group.size, group.index(self.topology.rank)
        chunks = np.array_split(values[me], p)
        neighbour = group.ranks[(me - 1) % p]
        # A reduce-scatter and an all-gather send each chunk to one neighbor.
        sent = [chunks[(me + first + step) % p] for step in range(p - 1) for first in (1, 0)]
        self.cluster.count(self.topology.rank, neighbour, *sent)
        total = sum(values[1:], values[0].copy())
        return tf.constant(total * np.asarray(scale, total.dtype))

    def all_gather(self, tensor, group, name):
        parts = self._meet("all_gather", tensor, group, name)
        p, me = group.size, group.index(self.topology.rank)
        sent = [parts[(me - step) % p] for step in range(p - 1)]
        self.cluster.count(self.topology.rank, group.ranks[(me + 1) % p], *sent)
        return tf.constant(np.concatenate(parts))

    def all_to_all(self, tensor, splits, group, name):
        splits = [int(part) for part in splits]
        assert sum(splits) == tensor.shape[0]
        mine = np.split(tensor.numpy(), np.cumsum(splits)[:-1])
        size = tensor.dtype.size
        everybody = self.cluster.meet(self.topology.rank, "all_to_all", group, name, mine, size)
        for receiver, part in zip(group.ranks, mine, strict=True):
            if receiver != self.topology.rank:
                self.cluster.count(self.topology.rank, receiver, part)
        return tf.constant(
            np.concatenate([parts[group.index(self.topology.rank)] for parts in everybody])
        )

    def broadcast(self, tensor, root_rank, name):
        value = self._meet("broadcast", tensor, self.topology.world, name)[root_rank]
        p = self.topology.size
        index = (self.topology.rank - root_rank) % p
        # In a binomial tree, the number of ranks that have the value doubles in each round.
        for distance in (2**i for i in range(p.bit_length())):
            if index < distance and index + distance < p:
                self.cluster.count(self.topology.rank, (root_rank + index + distance) % p, value)
        return tf.constant(value)

    def _meet(self, operation, tensor, group, name):
        size = tensor.dtype.size
        return self.cluster.meet(self.topology.rank, operation, group, name, tensor.numpy(), size)
