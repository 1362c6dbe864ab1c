"""A wire whose ranks are threads of this process, and which counts every byte it passes on.

It moves values the way Gloo does: rings chunk by chunk, all-to-all straight. It makes tests of many
ranks fast; the same table also runs on real Horovod ranks.
"""

import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from tfposeidon.communication.topology import Topology


class Cluster:
    """What the ranks of one job share."""

    def __init__(self, nodes):
        self.topology = Topology(0, nodes)
        self.sent = Counter()
        self.names = defaultdict(list)
        self._meetings = defaultdict(Meeting)
        self._lock = threading.Lock()

    def run(self, function):
        """`function(wire)` on every rank at once; results in rank order."""
        size = self.topology.size
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: function(InProcessWire(self, rank)), range(size)))

    def meet(self, rank, group, name, value):
        """Everybody's value, in the group's order, once all have come."""
        with self._lock:
            self.names[rank].append(name)
            meeting = self._meetings[group.ranks, name]
            assert rank not in meeting.values, f"{name} was used twice on rank {rank}"
            meeting.values[rank] = value
            if len(meeting.values) == group.size:
                meeting.complete.set()
        assert meeting.complete.wait(timeout=300), f"{name}: ranks are missing"
        return [meeting.values[r] for r in group.ranks]

    def count(self, sender, receiver, *arrays):
        bytes_sent = sum(array.nbytes for array in arrays)
        with self._lock:
            self.sent[sender, self.topology.same_node(sender, receiver)] += bytes_sent

    def bytes_of(self, rank):
        """Bytes that `rank` sent in its node and across nodes."""
        return self.sent[rank, True], self.sent[rank, False]


class Meeting:
    """What the ranks of a group bring to one collective; only they are woken when it is complete."""

    def __init__(self):
        self.values = {}
        self.complete = threading.Event()


class InProcessWire:
    def __init__(self, cluster, rank):
        self.cluster = cluster
        self.topology = cluster.topology.seen_from(rank)

    def all_reduce(self, tensor, group, name, scale=1.0):
        values = self._meet(tensor, group, name)
        p, me = group.size, group.index(self.topology.rank)
        chunks = np.array_split(values[me], p)
        neighbour = group.ranks[(me - 1) % p]
        # Reduce-scatter, then all-gather, chunk by chunk to one neighbour.
        sent = [chunks[(me + first + step) % p] for step in range(p - 1) for first in (1, 0)]
        self.cluster.count(self.topology.rank, neighbour, *sent)
        total = sum(values[1:], values[0].copy())
        return tf.constant(total * np.asarray(scale, total.dtype))

    def all_gather(self, tensor, group, name):
        parts = self._meet(tensor, group, name)
        p, me = group.size, group.index(self.topology.rank)
        sent = [parts[(me - step) % p] for step in range(p - 1)]
        self.cluster.count(self.topology.rank, group.ranks[(me + 1) % p], *sent)
        return tf.constant(np.concatenate(parts))

    def all_to_all(self, tensor, splits, group, name):
        splits = [int(part) for part in splits]
        assert sum(splits) == tensor.shape[0]
        mine = np.split(tensor.numpy(), np.cumsum(splits)[:-1])
        everybody = self.cluster.meet(self.topology.rank, group, name, mine)
        for receiver, part in zip(group.ranks, mine, strict=True):
            if receiver != self.topology.rank:
                self.cluster.count(self.topology.rank, receiver, part)
        return tf.constant(
            np.concatenate([parts[group.index(self.topology.rank)] for parts in everybody])
        )

    def broadcast(self, tensor, root_rank, name):
        value = self._meet(tensor, self.topology.world, name)[root_rank]
        p = self.topology.size
        place = (self.topology.rank - root_rank) % p
        for distance in (2**i for i in range(p.bit_length())):
            if place < distance and place + distance < p:
                self.cluster.count(self.topology.rank, (root_rank + place + distance) % p, value)
        return tf.constant(value)

    def _meet(self, tensor, group, name):
        return self.cluster.meet(self.topology.rank, group, name, tensor.numpy())
